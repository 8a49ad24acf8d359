"""Preloaded last by a template: what the first model and the first optimizer of a process would import.

Constructing on the meta device and making any optimizer imports some 800 modules the first time. Nothing is computed:
the meta device has no data, so no thread pool starts.
"""

import torch

_LAYER = torch.nn.Linear(1, 1, device="meta")
torch.optim.SGD(_LAYER.parameters(), lr=0.1)
