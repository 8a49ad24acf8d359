"""DDP's buckets, in the order that they keep.

DDP lays gradients into buckets, and after the first step of a process it lays them anew, in the order in which they
came. Where a gradient lies decides in which order the ranks' parts of it are added up, and with three ranks or more
(a + b) + c is not a + (b + c). So the first step after a restart would round in another way than in a run that nobody
disturbed, unless the buckets are laid anew before it, too.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from deepvm.errors import UsageError


def with_final_buckets(network: DistributedDataParallel) -> DistributedDataParallel:
    """The same network, with its buckets in their final order: ``network = settled(DistributedDataParallel(model))``.

    Every rank calls it, before the Checkpointer is made; it costs one exchange of gradients. No generator is drawn
    from, and weights and buffers stay as they are. What a run computes then does not depend on when its processes were
    started.
    """
    if not isinstance(network, DistributedDataParallel):
        raise UsageError(f"a {type(network).__qualname__} has no buckets: give the DistributedDataParallel itself")
    module = network.module
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(parameter.grad is not None for parameter in trained):
        raise UsageError("there are gradients already: settle the buckets before the first step")

    def touch_all() -> torch.Tensor:
        device = trained[0].device
        return torch.stack([parameter.flatten()[:1].sum().to(device, torch.float32) for parameter in trained]).sum()

    own = module.__dict__.get("forward")  # where an instance has one that is not its class's
    module.forward = touch_all
    try:
        network().backward()
    finally:
        del module.forward
        if own is not None:
            module.forward = own
    for parameter in trained:
        parameter.grad = None
    return network
