"""Sizes of a job's tensors -> the memory of one device, by part. Scripts and models use the same formula.

The parts ``weights``, ``gradients`` and ``optimizer`` are those that FSDP divides among all GPUs.
"""

from __future__ import annotations

from deepvm.performance.job import Parallel


def memory_parts(
    *,
    weights: int,
    gradients: int,
    optimizer: int,
    activations: int,
    parallel: Parallel,
    peak_bytes: int | None = None,
    casts: int = 0,
    gathered: int = 0,
) -> dict[str, int]:
    """Return the bytes of each part.

    ``peak_bytes`` was measured on one GPU: what the other parts do not explain is activations. DDP keeps its buckets, a
    second copy of the gradients (gradient_as_bucket_view=False, its default). FSDP holds the modules at hand whole:
    ``gathered``. ``casts`` are the weights in 16 bits that autocast keeps until the end of the forward pass."""
    if peak_bytes is not None:
        activations = max(0, peak_bytes - weights - gradients - optimizer)
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "activations": activations}
    if parallel == "ddp":
        parts |= {"casts": casts, "buckets": gradients}
    else:
        parts |= {"gathered": gathered}
    return {name: size for name, size in parts.items() if size}
