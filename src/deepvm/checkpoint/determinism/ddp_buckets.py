"""A new DDP network -> the same network with its buckets in their final order.

DDP puts gradients into buckets, and rebuilds these after the first step of a process, in the order in which gradients
arrived. A gradient's place decides in which order the ranks' parts are added, and with three ranks or more (a + b) + c
is not a + (b + c). So the first step after a restart would round differently, unless the buckets are rebuilt before it.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from deepvm.errors import UsageError


def with_final_buckets(network: DistributedDataParallel) -> DistributedDataParallel:
    """Put the buckets into their final order: ``network = with_final_buckets(DistributedDataParallel(model))``.

    Every rank calls it before it creates the Checkpointer; it costs one exchange of gradients. It draws from no
    generator, and weights and buffers stay as they are. Results then do not depend on when processes were started.
    """
    if not isinstance(network, DistributedDataParallel):
        raise UsageError(f"a {type(network).__qualname__} has no buckets: pass the DistributedDataParallel itself")
    module = network.module
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(parameter.grad is not None for parameter in trained):
        raise UsageError("there are gradients already: call with_final_buckets before the first step")

    def touch_all() -> torch.Tensor:
        device = trained[0].device
        return torch.stack([parameter.flatten()[:1].sum().to(device, torch.float32) for parameter in trained]).sum()

    own = module.__dict__.get("forward")  # an instance may have one that is not its class's
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
