"""Two networks with an optimizer each; the discriminator steps twice for each step of the generator."""

import torch
from torch import nn

STEPS = 18
generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256))
discriminator = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer_g = torch.optim.Adam(generator.parameters())
optimizer_d = torch.optim.RMSprop(discriminator.parameters())
for _ in range(STEPS):
    for _ in range(2):
        real, fake = torch.randn(24, 256), generator(torch.randn(24, 16)).detach()
        loss_d = discriminator(fake).mean() - discriminator(real).mean()
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()
    loss_g = -discriminator(generator(torch.randn(24, 16))).mean()
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
