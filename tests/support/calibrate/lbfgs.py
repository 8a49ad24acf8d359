"""LBFGS, whose closure runs the model several times in a step, on parameters that no module owns and a frozen layer."""

import torch
from torch import nn

STEPS = 15
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
model[0].requires_grad_(False)
shift = torch.zeros(256, 1, requires_grad=True)
optimizer = torch.optim.LBFGS([*model[2].parameters(), shift], lr=1e-3, max_iter=3, history_size=4)
x, y = torch.randn(256, 64), torch.randn(256, 1)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x) + shift, y)
    loss.backward()
    return loss


for _ in range(STEPS):
    optimizer.step(closure)
