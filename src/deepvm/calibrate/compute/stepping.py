"""Train a workload and time its steps: a workload, a batch size and a device in; step times out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from deepvm.calibrate.compute.devices import TrainingDevice, autocast
from deepvm.calibrate.compute.steady import is_steady
from deepvm.calibrate.workloads import Workload
from deepvm.errors import UsageError
from deepvm.performance.measured import Samples

LEAST_STEPS = 5
MOST_WARM_UP = 40  # steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    step_s: Samples
    settled: bool  # the warm-up ended steady


class Stepper:
    """One model on one device, with one batch that every step trains on. ``wrap`` makes it data-parallel."""

    def __init__(
        self,
        workload: Workload,
        batch: int,
        device: TrainingDevice,
        *,
        precision: str = "fp32",
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.workload, self.device, self.precision = workload, device, precision
        torch.manual_seed(0)
        with _out_of_memory(workload.name, batch):
            model = workload.spec.make().to(device.torch).train()
            self.model = model if wrap is None else wrap(model)
            self.optimizer = workload.make_optimizer(self.model)
            self.data = workload.make_batch(batch, device.torch)
        self.batch = batch
        half = precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.torch.type, enabled=half)

    def step(self) -> float:
        """Train one step and return its seconds."""
        with _out_of_memory(self.workload.name, self.batch):
            self.device.synchronise()
            began = time.perf_counter()
            with autocast(self.precision, self.device.torch):
                loss = self.workload.spec.loss(self.model, self.data)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            self.device.synchronise()
            return time.perf_counter() - began


def time_steps(
    step: Callable[[], float],
    *,
    repeats: int,
    limit_s: float,
    tick: Callable[[], None] = lambda: None,
    go_on: Callable[[bool], bool] = lambda wanted: wanted,
) -> Timing:
    """Warm up until steps are steady, then time ``repeats`` of them. Each half ends after ``limit_s``, but not before
    a few steps. ``go_on`` lets ranks agree on whether another step follows."""
    warm: list[float] = []
    began = time.monotonic()

    def warming() -> bool:
        bounded = len(warm) < MOST_WARM_UP and (time.monotonic() - began < limit_s or len(warm) < 2)
        return bounded and not is_steady(warm)

    while go_on(warming()):
        warm.append(step())
        tick()
    taken: list[float] = []
    began = time.monotonic()

    def timing() -> bool:
        return len(taken) < LEAST_STEPS or (len(taken) < repeats and time.monotonic() - began < limit_s)

    while go_on(timing()):
        taken.append(step())
        tick()
    return Timing(step_s=Samples(tuple(taken)), settled=is_steady(warm))


class _out_of_memory:
    """Turns torch's errors about memory into one sentence."""

    def __init__(self, name: str, batch: int) -> None:
        self.text = f"{name} with a batch of {batch} does not fit into memory: give a smaller --batch"

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        short = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if short or (isinstance(error, RuntimeError) and "not enough memory" in str(error)):
            raise UsageError(self.text) from None
