"""A script's training steps, as hooks see them -> the measurements of a job.

First come ``warmup`` steps, in which batch and precision are observed. Then ``steps`` are timed, with nothing but a
clock in the optimizers' hook. In the last ones FLOPs are counted. Then ``Finished`` ends the script.
"""

from __future__ import annotations

import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from deepvm.calibrate.counting import StepCounter
from deepvm.calibrate.job.found_state import FoundState, StateSize, estimate, tensor_bytes
from deepvm.calibrate.job.pace import Pace
from deepvm.errors import CheckpointError

COUNTED_STEPS = 2  # FLOPs are the smaller count: one of them may include an evaluation
LEAST_TIMED = 3  # steps, if they take so long that there is no time for all
TIMED_SHARE = 0.5  # of the time that is left
MOST_RESTARTS = 4


class Finished(BaseException):
    """Ends the script at a step, once everything is measured. Not an Exception, which scripts catch."""


class Watch:
    def __init__(
        self,
        *,
        warmup: int,
        steps: int,
        ends_s: float,
        report: Callable[[Mapping[str, Any]], None],
        progress: Callable[[int], None],
    ) -> None:
        self._warmup, self._wanted, self._ends_s = warmup, steps, ends_s
        self._report, self._progress = report, progress
        self._pace = Pace()
        self.checkpointer: Any = None
        self.seen: dict[str, int] = {"optimizer steps": 0, "batches": 0, "forward passes": 0, "ckpt.step() calls": 0}
        self.done, self._restarts, self._phase = 0, 0, "warmup"
        self._begun_s: float | None = None
        self._timed_from_s = 0.0
        self._times: list[float] = []
        self._waits: list[float] = []
        self._waited_s, self._fetched = 0.0, 0
        self._calls: list[int] = []  # samples of each forward pass of the first module, in this step
        self._firsts: list[int] = []  # those that came first before each backward pass
        self._backward_came = True
        self._gradient_hooks: list[RemovableHandle] = []
        self._batches: list[int] = []  # samples of each step
        self._first: torch.nn.Module | None = None
        self._has_closure = False
        self._precision: str | None = None
        self._forward_hook: RemovableHandle | None = register_module_forward_pre_hook(self._forward)
        self._state: FoundState | None = None
        self._before: StateSize | None = None
        self._counters: list[StepCounter] = []
        self._document: dict[str, Any] = {}

    # --- what hooks call ----------------------------------------------------------------------------------------

    def optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.seen["optimizer steps"] += 1
        self._has_closure |= any(callable(one) for one in (*args, *kwargs.values()))
        if self._phase == "timed" and self._pace.is_new(optimizer) and self._restarts < MOST_RESTARTS:
            self._restarts += 1
            self._restart()
        if self._pace.stepped(optimizer):
            self._stepped(self._pace.optimizers)

    def checkpointer_stepped(self, checkpointer: Any) -> None:
        """The boundary of scripts whose optimizer torch does not know."""
        self.seen["ckpt.step() calls"] += 1
        self.checkpointer = checkpointer
        if not self.seen["optimizer steps"] and self.seen["ckpt.step() calls"] > 1:
            self._stepped([])

    def batch_came(self, seconds: float) -> None:
        self.seen["batches"] += 1
        self._waited_s += seconds
        self._fetched += 1

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the call of the compiled module itself is seen, its parts are traced
            return
        tensor = next((a for a in args if isinstance(a, torch.Tensor) and a.dim()), None)
        if self._first is None:
            if tensor is None or next(module.parameters(), None) is None or not torch.is_grad_enabled():
                return  # an augmentation, an evaluation, or a call by names: one of its parts gets the tensor
            self._first = module
            held: list[Any] = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
            self._gradient_hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in held]
        if module is self._first:
            self.seen["forward passes"] += 1
            if tensor is not None and torch.is_grad_enabled():
                self._calls.append(int(tensor.shape[0]))
                if self._backward_came or not self._gradient_hooks:
                    self._firsts.append(self._calls[-1])
                self._backward_came = False
                self._precision = self._precision or _autocast(tensor.device.type)

    def _accumulated(self, _: torch.Tensor) -> None:
        self._backward_came = True

    # --- phases -------------------------------------------------------------------------------------------------

    def _stepped(self, optimizers: list[Any]) -> None:
        if self._phase == "finished":
            raise Finished
        _synchronize(optimizers)
        now_s = time.perf_counter()
        self.done += 1
        if self._phase == "warmup":
            self._observe_batch()
            if self.done >= self._warmup and self._unhooked():
                self._begin_timing(optimizers)
        elif self._phase == "timed":
            assert self._begun_s is not None  # noqa: S101 - set by the last step
            self._times.append(now_s - self._begun_s)
            self._waits.append(self._waited_s)
            enough_s = TIMED_SHARE * max(0.0, self._ends_s - self._timed_from_s)
            late = len(self._times) >= LEAST_TIMED and now_s - self._timed_from_s > enough_s
            if len(self._times) >= self._wanted or late:
                self._end_timing(optimizers)
        else:
            self._counters[-1].stop()
            if len(self._counters) == COUNTED_STEPS:
                self._finish()
            self._count()
        self._progress(self.done)
        self._waited_s, self._fetched, self._calls, self._firsts = 0.0, 0, [], []
        self._backward_came = True
        self._begun_s = time.perf_counter()

    def _restart(self) -> None:
        """Another optimizer joined: what was timed was no whole step."""
        self._pace.restart()
        self._phase, self.done = "warmup", 0
        self._times, self._waits = [], []

    def _observe_batch(self) -> None:
        """Several fetches, or several backward passes, before an optimizer steps: gradients are accumulated. Several
        forward passes before one backward pass are of one loss, such as that of triplets."""
        if not self._calls:
            return
        once = len(self._pace.optimizers) > 1 or self._has_closure  # other passes are over the same samples
        if self._fetched:
            parts = self._fetched
            self._batches.append(sum(self._calls[:parts]) if parts <= len(self._calls) else self._calls[0] * parts)
        else:
            self._batches.append(self._calls[0] if once else sum(self._firsts))

    def _unhooked(self) -> bool:
        """Take the hook off forward passes. False if compiled code may be compiled again in the next step for that."""
        for each in self._gradient_hooks:
            each.remove()
        self._gradient_hooks = []
        hook, self._forward_hook = self._forward_hook, None
        if hook is not None:
            hook.remove()
        return hook is None or "torch._dynamo" not in sys.modules

    def _begin_timing(self, optimizers: list[Any]) -> None:
        self._phase = "timed"
        if optimizers:
            self._pace.fix()
        device = _device(optimizers)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._timed_from_s = time.perf_counter()

    def _end_timing(self, optimizers: list[Any]) -> None:
        """Report what is known, then count: a script that cannot bear that has its other figures."""
        self._phase = "counted"
        peak_bytes = _peak_bytes(_device(optimizers))
        self._state = FoundState(optimizers, self.checkpointer)
        self._document = {**self._figures(), "device_peak_bytes": peak_bytes}
        self._measure_state()
        self._report({"outcome": "timed", **self._document})
        self._count()

    def _count(self) -> None:
        assert self._state is not None  # noqa: S101 - set by the last phase
        counter = StepCounter([*self._state.parameters, *self._state.buffers])
        counter.start()
        self._counters.append(counter)

    def _finish(self) -> None:
        assert self._state is not None  # noqa: S101 - as above
        self._measure_state()
        least = min(self._counters, key=lambda counter: counter.flops)
        self._document |= {
            "flops_per_step": least.flops,
            "traffic_bytes_per_step": least.traffic_bytes,
            "activation_bytes": least.activation_bytes,
        }
        self._phase = "finished"
        self._state.close()
        self._report({"outcome": "done", **self._document})
        if self.checkpointer is not None:
            self.checkpointer.close(10.0, last_save=False)
        raise Finished

    # --- figures ------------------------------------------------------------------------------------------------

    def _figures(self) -> dict[str, Any]:
        assert self._state is not None  # noqa: S101 - as above
        state = self._state
        timed_s = sum(self._times)
        return {
            "step_s": self._times,
            "data_share": min(1.0, sum(self._waits) / timed_s) if self.seen["batches"] and timed_s else None,
            "batch": round(statistics.median(self._batches)) if self._batches else None,
            "parameters": sum(p.numel() for p in state.parameters),
            "trainable_parameters": sum(p.numel() for p in state.parameters if p.requires_grad),
            "gradient_bytes": sum(map(tensor_bytes, state.optimized or state.parameters)),
            "weight_bytes": sum(map(tensor_bytes, [*state.parameters, *state.buffers])),
            "optimizer_bytes": state.optimizer_bytes,
            "host_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if sys.platform == "darwin" else 1024),
            "precision": self._precision or _precision(state.parameters),
            "fsdp": any(
                type(m).__name__.startswith(("FSDP", "FullySharded")) for r in state.modules for m in r.modules()
            ),
            "device": _device(state.optimizers),
            "accelerator": torch.cuda.get_device_name() if _device(state.optimizers) == "cuda" else None,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
        }

    def _measure_state(self) -> None:
        """Set the sizes by component: the second time with what changed in the steps between."""
        assert self._state is not None  # noqa: S101 - as above
        try:
            size = self._state.size()
            rows: Mapping[str, Any] = size.by_component(self._before or size)
            if self._before is None:
                rows = {name: (bytes_, None) for name, (bytes_, _) in rows.items()}
            self._before = size
            self._document |= {"components": rows, "savable": True}
        except CheckpointError as error:
            self._document |= {"components": estimate(self._state), "savable": False, "why": str(error)[:500]}

    def describe(self) -> str:
        """Say what was seen so far, for a script that does not step."""
        found = [f"{count} {what}" for what, count in self.seen.items() if count]
        return ", ".join(found) or "no forward pass and no batch"


def _device(optimizers: list[Any]) -> str:
    held = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    first = next(held, None)
    return "cpu" if first is None else str(first.device.type)


def _synchronize(optimizers: list[Any]) -> None:
    """Wait for the device: an optimizer's step returns before its kernels have run."""
    device = _device(optimizers)
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def _peak_bytes(device: str) -> int | None:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return int(torch.mps.driver_allocated_memory()) if device == "mps" else None


def _autocast(device: str) -> str | None:
    if not torch.is_autocast_enabled(device):
        return None
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(torch.get_autocast_dtype(device))


def _precision(parameters: list[torch.Tensor]) -> str:
    largest = max(parameters, key=torch.Tensor.numel, default=None)
    kind = torch.float32 if largest is None else largest.dtype
    if kind is torch.float32 and largest is not None and largest.device.type == "cuda":
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(kind, "fp32")


def main_thread_waits(watch: Watch) -> Callable[[float], None]:
    """Return what counts a wait for data, of the thread that trains: others load ahead."""
    trainer = threading.main_thread().ident

    def count(seconds: float) -> None:
        if threading.get_ident() == trainer:
            watch.batch_came(seconds)

    return count
