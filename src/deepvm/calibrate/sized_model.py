"""A size in bytes -> a small network with Adam whose checkpoint has that size, and steps that change all of it.

The processes of ``network`` and ``overheads`` train it."""

from __future__ import annotations

import torch
from torch import nn

BYTES_PER_PARAMETER = 12  # FP32, with Adam's two averages
LEAST_BYTES = 12_000
_WIDEST = 512


class SizedModel(nn.Module):
    """Linear layers, and one vector with the parameters that are left."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        parameters = max(1, state_bytes // BYTES_PER_PARAMETER)
        self.width = max(1, min(_WIDEST, int((parameters / 2) ** 0.5)))
        each = self.width * self.width + self.width
        layers = max(1, (parameters - 1) // each)
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(layers))
        self.rest = nn.Parameter(torch.zeros(max(1, parameters - layers * each)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / len(self.layers)
        return (x.square().mean() + (self.rest - 1.0).square().mean()).reshape(())


class SizedTraining:
    """The model, its optimizer, and a step."""

    def __init__(self, state_bytes: int, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = SizedModel(state_bytes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.network: nn.Module = self.model  # or a wrapper of it, such as DDP

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> float:
        """Train once, with other data than before: every parameter and average changes."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.network(torch.randn(2, self.model.width))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.detach())
