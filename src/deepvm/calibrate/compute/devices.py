"""The device that trains here: a word of the user in; a torch device, its synchronisation and its name out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepvm.calibrate.models.dry_run import HALF
from deepvm.catalog.accelerators import find, of_size
from deepvm.errors import UnknownName, UsageError
from deepvm.performance.job import PRECISIONS
from deepvm.performance.measured import Machine

DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingDevice:
    torch: torch.device
    synchronise: Callable[[], None]
    accelerator: str | None = None  # a name of the accelerator table, or the driver's
    count: int = 0  # devices like it on this machine

    def on(self, machine: Machine) -> Machine:
        """Return the machine as it trains with this device."""
        return replace(machine, accelerator=self.accelerator, accelerator_count=self.count)

    @property
    def power_index(self) -> int | None:
        return (self.torch.index or 0) if self.torch.type == "cuda" else None


def pick_device(name: str = "auto", index: int = 0) -> TrainingDevice:
    """Find the device. UsageError if this machine, or this build of torch, does not have it."""
    if name not in DEVICES:
        raise UnknownName("device", name, DEVICES)
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return _cuda(index)
    if name == "mps" or (name == "auto" and torch.backends.mps.is_available()):
        if not torch.backends.mps.is_available():
            raise UsageError("this machine has no MPS device: leave out --device, or say --device cpu")
        return TrainingDevice(
            torch=torch.device("mps"), synchronise=torch.mps.synchronize, accelerator="Apple GPU", count=1
        )
    return TrainingDevice(torch=torch.device("cpu"), synchronise=lambda: None)


def _cuda(index: int) -> TrainingDevice:
    if not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device that torch can use: leave out --device, or say --device cpu")
    if index >= torch.cuda.device_count():
        raise UsageError(f"GPU {index} is asked for, this machine has {torch.cuda.device_count()}")
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(index)
    known = find(properties.name)
    if known is not None:  # an A100 is sold with two sizes of memory
        known = of_size(known, properties.total_memory / 2**30) or known
    return TrainingDevice(
        torch=device,
        synchronise=lambda: torch.cuda.synchronize(device),
        accelerator=known.name if known is not None else properties.name,
        count=torch.cuda.device_count(),
    )


def check_precision(precision: str, device: torch.device) -> None:
    """Raise UsageError if the device cannot train with this precision."""
    if precision not in PRECISIONS:
        raise UnknownName("precision", precision, PRECISIONS)
    if precision == "tf32" and device.type != "cuda":
        raise UsageError(f"tf32 is a mode of NVIDIA GPUs: a {device.type} device trains with fp32 or bf16")
    if precision == "fp16" and device.type == "cpu":
        raise UsageError("fp16 needs a GPU: a cpu device trains with fp32 or bf16")


@contextlib.contextmanager
def precision_mode(precision: str) -> Iterator[None]:
    """Allow or forbid TF32 while it lasts."""
    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def autocast(precision: str, device: torch.device) -> Any:
    """Return the context of a forward pass."""
    if precision in HALF:
        return torch.autocast(device.type, HALF[precision])
    return contextlib.nullcontext()


def cores_here() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
