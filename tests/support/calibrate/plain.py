"""A plain loop: DataLoader, SGD with momentum, a scheduler, batch norm, and torch.save after each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 15
model = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 512), nn.ReLU(),
    nn.Linear(512, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
data = TensorDataset(torch.randn(160, 1, 8, 8), torch.randint(0, 10, (160,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
for _epoch in range(STEPS // 5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    scheduler.step()
    torch.save(model.state_dict(), "model.pt")
