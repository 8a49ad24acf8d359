"""Versions, threads, flags, devices and ranks -> plain values in every checkpoint, and sentences on what has changed.

If one differs after a restore, the run continues, but not bit for bit; ``component`` reports it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from deepvm.checkpoint.determinism import rng_state

# What follows if a value has changed since the checkpoint was saved
_CONSEQUENCES = {
    "world_size": "batches, sums over ranks and generators are not those of the saved run",
    "threads": "sums are added up in another order; torch.set_num_threads({saved})",
    "interop_threads": "operations may run side by side in another way; torch.set_num_interop_threads({saved})",
    "omp_num_threads": "other libraries add up in another order; start with OMP_NUM_THREADS={saved}",
    "torch": "its kernels may round in another way",
    "python": "its hashes and its random module may differ",
    "numpy": "its generators and sums may differ",
    "devices": "their kernels round in another way",
    "deterministic": "torch chooses other kernels; call deepvm.checkpoint.deterministic, or leave it out",
    "cudnn_deterministic": "cuDNN chooses other kernels; torch.backends.cudnn.deterministic = {saved}",
    "cudnn_benchmark": "cuDNN chooses other kernels; torch.backends.cudnn.benchmark = {saved}",
    "cudnn_tf32": "convolutions round in another way; torch.backends.cudnn.allow_tf32 = {saved}",
    "matmul_precision": "products round in another way; torch.set_float32_matmul_precision({saved!r})",
    "default_dtype": "new tensors have another type; torch.set_default_dtype({saved})",
}
_LABELS = {
    "world_size": "the number of ranks",
    "threads": "the number of threads",
    "interop_threads": "the number of interop threads",
    "omp_num_threads": "OMP_NUM_THREADS",
    "python": "Python",
    "numpy": "NumPy",
    "deterministic": "the demand for deterministic algorithms",
}


def take(world_size: int, *, with_cuda: bool | None = None) -> dict[str, Any]:
    """Return all values; takes some microseconds. GPUs are included if they are in use, or if ``with_cuda``."""
    return {
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "torch": str(torch.__version__),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "numpy": getattr(sys.modules.get("numpy"), "__version__", None),
        "devices": list(_devices(rng_state.cuda_in_use() if with_cuda is None else with_cuda)),
        "deterministic": ("off", "warn", "on")[torch.get_deterministic_debug_mode()],
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": _flag(lambda: torch.backends.cudnn.allow_tf32),
        "matmul_precision": _flag(torch.get_float32_matmul_precision),
        "default_dtype": str(torch.get_default_dtype()),
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each value that has changed."""
    found = []
    for name, consequence in _CONSEQUENCES.items():
        if name not in saved or name not in now or saved[name] == now[name]:
            continue
        if name == "numpy" and None in (saved[name], now[name]):
            continue  # NumPy was not loaded at one of the times
        before, after = (_shown(values[name]) for values in (saved, now))
        found.append(f"{_LABELS.get(name, name)} was {before} and is {after}: {consequence.format(saved=saved[name])}")
    return found


@cache
def _devices(with_cuda: bool) -> tuple[str, ...]:
    """Return the processors' names."""
    processor = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if not with_cuda:
        return (processor,)
    return (processor, *(f"cuda {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())))


def _flag(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # torch raises if its old and its new flags were mixed
        return "mixed"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not set" if value is None else str(value)
