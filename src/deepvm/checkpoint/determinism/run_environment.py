"""What a step's result depends on beside the state: versions, threads, flags, devices, the number of ranks.

They are named in every checkpoint, and a restore that finds others says so: the run goes on, but not bit for bit.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from deepvm.checkpoint.determinism import rng_state

# What follows where it is another one than when the checkpoint was saved
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
_SPOKEN = {
    "world_size": "the number of ranks",
    "threads": "the number of threads",
    "interop_threads": "the number of interop threads",
    "omp_num_threads": "OMP_NUM_THREADS",
    "python": "Python",
    "numpy": "NumPy",
    "deterministic": "the demand for deterministic algorithms",
}


def take(world_size: int, *, with_cuda: bool | None = None) -> dict[str, Any]:
    """All of them, as plain values; costs some microseconds. GPUs are asked for their names where they are in use, or
    ``with_cuda`` says so."""
    return {
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "torch": str(torch.__version__),
        "python": _python(),
        "numpy": getattr(sys.modules.get("numpy"), "__version__", None),
        "devices": list(_devices(rng_state.cuda_in_use() if with_cuda is None else with_cuda)),
        "deterministic": ("off", "warn", "on")[torch.get_deterministic_debug_mode()],
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": _asked(lambda: torch.backends.cudnn.allow_tf32),
        "matmul_precision": _asked(torch.get_float32_matmul_precision),
        "default_dtype": str(torch.get_default_dtype()),
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence for each circumstance that is another one now."""
    found = []
    for name, consequence in _CONSEQUENCES.items():
        if name not in saved or name not in now or saved[name] == now[name]:
            continue
        if name == "numpy" and None in (saved[name], now[name]):
            continue  # not loaded at one of the times: that tells nothing
        before, after = (_shown(values[name]) for values in (saved, now))
        told = consequence.format(saved=saved[name])
        found.append(f"{_SPOKEN.get(name, name)} was {before} and is {after}: {told}")
    return found


@cache
def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


@cache
def _devices(with_cuda: bool) -> tuple[str, ...]:
    """The processors' names. CUDA is asked once the trainer uses it, and not started for that."""
    processor = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if not with_cuda:
        return (processor,)
    return (processor, *(f"cuda {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())))


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except RuntimeError:  # torch refuses to answer where its old and its new flags were mixed
        return "mixed"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not set" if value is None else str(value)
