"""A script's steps as hooks see them: warm-up, timing, counting, and the figures that are reported."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepvm.calibrate.job import watch as watch_module
from deepvm.calibrate.job.watch import Finished, Watch, main_thread_waits

FAR = 1e12  # a deadline


class Script:
    """A training script, with what the observer installs around it."""

    def __init__(self, *, warmup: int = 2, steps: int = 3, ends_s: float = FAR, width: int = 4) -> None:
        self.reports: list[Mapping[str, Any]] = []
        self.shown: list[int] = []
        self.watch = Watch(
            warmup=warmup, steps=steps, ends_s=ends_s, report=self.reports.append, progress=self.shown.append
        )
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def forward(self, batch: int = 5) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(batch, self.model[0].in_features)).sum()
        return loss

    def step(self, batch: int = 5, optimizer: torch.optim.Optimizer | None = None, *words: object) -> None:
        self.forward(batch).backward()
        self.stepped(optimizer or self.optimizer, *words)

    def stepped(self, optimizer: torch.optim.Optimizer, *words: object) -> None:
        optimizer.step()
        self.watch.optimizer_stepped(optimizer, words, {})

    def until_finished(self, batch: int = 5) -> dict[str, Any]:
        finishes(lambda: self.step(batch))
        return dict(self.reports[-1])


def finishes(steps: Callable[[], object]) -> None:
    """Repeat steps until the script is ended."""

    def train() -> None:
        for _ in range(60):
            steps()

    with pytest.raises(Finished):
        train()


@pytest.fixture(autouse=True)
def no_hook_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    without_compiler = {name: module for name, module in sys.modules.items() if name != "torch._dynamo"}
    monkeypatch.setattr(watch_module, "sys", SimpleNamespace(modules=without_compiler, platform=sys.platform))
    before = len(nn.modules.module._global_forward_pre_hooks)
    yield
    for number in list(nn.modules.module._global_forward_pre_hooks)[before:]:
        del nn.modules.module._global_forward_pre_hooks[number]


def test_a_script_is_warmed_up_timed_counted_and_ended() -> None:
    script = Script()
    found = script.until_finished()
    assert script.shown == [1, 2, 3, 4, 5, 6]
    assert script.watch.done == 7
    assert [report["outcome"] for report in script.reports] == ["timed", "done"]
    timed = dict(script.reports[0])
    parameters = 4 * 4 + 4 + 4 + 1
    figures = {
        "data_share": None, "batch": 5, "parameters": parameters, "trainable_parameters": parameters,
        "gradient_bytes": 4 * parameters, "weight_bytes": 4 * parameters, "optimizer_bytes": 4 * parameters,
        "precision": "fp32", "fsdp": False, "device": "cpu", "accelerator": None, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "device_peak_bytes": None, "savable": True,
    }  # fmt: skip
    assert timed == timed | figures
    assert len(timed["step_s"]) == 3
    assert all(0 < seconds < 60 for seconds in timed["step_s"])
    assert 10**7 < timed["host_memory_bytes"] < 10**12
    rows = timed["components"]
    assert [*rows] == ["model", "optimizer", "header"]
    assert {changed for _, changed in rows.values()} == {None}
    assert found == timed | found
    assert {name for name in found if found[name] != timed.get(name)} == {
        "outcome", "components", "flops_per_step", "traffic_bytes_per_step", "activation_bytes",
    }  # fmt: skip
    assert found["components"]["model"] == (4 * parameters, 4 * parameters)
    assert found["components"]["optimizer"] == (4 * parameters, 4 * parameters)
    # A product and a sum for each weight and sample: forward, and both gradients, but that of the input
    assert found["flops_per_step"] == 2 * 5 * (2 * 16 + 3 * 4)
    assert found["traffic_bytes_per_step"] > 0
    assert found["activation_bytes"] > 0
    with pytest.raises(Finished):
        script.step()
    assert len(script.reports) == 2
    assert script.watch.describe() == "8 optimizer steps, 2 forward passes"


def test_nothing_but_the_clock_is_there_while_steps_are_timed() -> None:
    script = Script(warmup=2)
    hooks = nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    script.step()
    assert len(hooks) == before
    script.step()
    assert len(hooks) == before - 1
    script.step()
    assert script.watch.seen["forward passes"] == 2


def test_with_a_compiler_there_is_one_more_step_before_timing() -> None:
    script = Script(warmup=1, steps=1)
    watch_module.sys.modules["torch._dynamo"] = torch
    script.until_finished()
    assert script.shown == [1, 2, 3, 4]  # as the hook's end may make it compile again


def test_while_a_model_is_compiled_no_pass_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    script.forward()
    assert script.watch.seen["forward passes"] == 0


def test_steps_that_take_long_are_timed_three_times_at_least() -> None:
    script = Script(warmup=1, steps=10, ends_s=0.0)
    script.until_finished()
    assert len(script.reports[0]["step_s"]) == 3
    assert script.shown == [1, 2, 3, 4, 5]


def test_half_of_the_time_that_is_left_is_for_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(watch_module.time, "perf_counter", lambda: now_s[0])
    script = Script(warmup=1, steps=50, ends_s=200.0)

    def step() -> None:
        script.watch.batch_came(0.5)
        now_s[0] += 10.0
        script.step()

    finishes(step)
    # From 110 s there are 90 s left: the fifth step ends after 50 s, and is the first after 45 s
    assert script.reports[0]["step_s"] == [10.0] * 5
    assert script.reports[0]["data_share"] == pytest.approx(0.05)
    assert script.reports[0]["batch"] == 5


def test_waits_are_at_most_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module.time, "perf_counter", iter(range(10**6)).__next__)
    script = Script(warmup=1, steps=2)
    finishes(lambda: (script.watch.batch_came(50.0), script.step()))
    assert script.reports[0]["data_share"] == 1.0


@pytest.mark.parametrize(
    ("fetches", "passes", "batch"),
    [(0, 1, 5), (1, 1, 5), (2, 2, 10), (0, 3, 15), (1, 3, 5), (4, 2, 20)],
)
def test_gradients_are_accumulated_over_fetches_and_passes(fetches: int, passes: int, batch: int) -> None:
    """One fetch and three passes are one batch: the other passes are over the same samples."""
    script = Script(warmup=3)

    def step() -> None:
        for _ in range(fetches):
            script.watch.batch_came(0.0)
        for _ in range(passes):
            script.forward().backward()
        script.stepped(script.optimizer)

    finishes(step)
    assert script.reports[0]["batch"] == batch


def test_several_forward_passes_of_one_loss_are_one_batch() -> None:
    script = Script(warmup=3)

    def step() -> None:
        for _ in range(2):  # accumulated gradients of triplets: an anchor, a positive and a negative one
            (script.forward() + script.forward() - script.forward()).backward()
        script.stepped(script.optimizer)

    finishes(step)
    assert script.reports[0]["batch"] == 10
    assert not any(p._post_accumulate_grad_hooks for p in script.model.parameters())


def test_the_batch_is_the_median_over_the_warm_up() -> None:
    script = Script(warmup=3)
    for batch in (7, 64, 8):
        script.step(batch)
    assert script.until_finished(3)["batch"] == 8


def test_a_closure_repeats_passes_over_the_same_samples() -> None:
    script = Script(warmup=1)
    script.forward()
    script.step(5, None, lambda: None)
    assert script.until_finished()["batch"] == 5


def test_passes_without_a_tensor_gradients_or_parameters_are_of_something_else() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.augment, self.inner = nn.Identity(), nn.Linear(4, 1)

        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(self.augment(x))
            return result

    script, model = Script(warmup=1), Parts()
    optimizer = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        model.inner(torch.ones(9, 4))
    nn.Identity()(torch.ones(8))
    model.augment(torch.tensor(3.0))
    assert script.watch.seen["forward passes"] == 0
    model(x=torch.ones(6, 4)).sum().backward()
    assert script.watch.seen["forward passes"] == 1  # of the part that gets the tensor
    with torch.no_grad():
        model(x=torch.ones(7, 4))
    assert script.watch.seen["forward passes"] == 2
    finishes(lambda: script.stepped(optimizer))
    assert script.reports[0]["batch"] == 6


def test_a_scalar_tensor_is_no_batch() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x) * scale
            return result

    script, model = Script(warmup=1), Scaled()
    model(torch.tensor(2.0), torch.ones(6, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finishes(lambda: script.stepped(optimizer))
    assert script.reports[0]["batch"] == 6


def test_a_second_optimizer_that_joins_begins_the_measurement_again() -> None:
    script = Script(warmup=2, steps=3)
    other = torch.optim.SGD(script.model[1].parameters(), lr=0.1)
    for _ in range(4):
        script.step()  # two of them are timed
    assert script.watch.done == 4
    finishes(lambda: (script.step(5, other), script.step()))
    assert len(script.reports[0]["step_s"]) == 3
    assert script.reports[0]["optimizer_bytes"] == 4 * 25  # the momentum of the first; the other one has none
    assert script.reports[0]["batch"] == 5


def test_optimizers_that_join_again_and_again_do_not_keep_it_from_ending() -> None:
    script = Script(warmup=1, steps=3)
    made = [script.optimizer]

    def step() -> None:
        for optimizer in made:
            script.step(5, optimizer)
        made.append(torch.optim.SGD(script.model.parameters(), lr=0.1))

    finishes(step)
    assert script.shown == [1, 2, 1, 1, 1, 1, 2, 3, 4, 5]  # four times it began again, then no more
    assert len(made) == 11


def test_a_script_with_an_optimizer_of_its_own_steps_with_its_checkpointer() -> None:
    class Checkpointer:
        state: Mapping[str, Any]

        def __init__(self, state: Mapping[str, Any]) -> None:
            self.state, self.closed = state, list[Any]()

        def components(self) -> Mapping[str, Any]:
            return self.state

        def close(self, timeout_s: float, *, last_save: bool) -> None:
            self.closed.append((timeout_s, last_save))

    script = Script(warmup=2, steps=3)
    weights = torch.zeros(7)
    checkpointer = Checkpointer({"weights": {"w": weights}})

    finishes(lambda: (weights.add_(1), script.watch.checkpointer_stepped(checkpointer)))
    assert script.shown == [1, 2, 3, 4, 5, 6]
    assert script.watch.seen["ckpt.step() calls"] == 8  # the first one begins the first step
    assert checkpointer.closed == [(10.0, False)]
    assert script.reports[-1]["components"]["weights"] == (28, 28)
    assert script.reports[-1]["batch"] is None
    assert (script.reports[-1]["device"], script.reports[-1]["parameters"]) == ("cpu", 0)
    assert script.watch.describe() == "8 ckpt.step() calls"


def test_calls_of_a_checkpointer_do_not_count_beside_an_optimizer() -> None:
    script = Script(warmup=2)
    for _ in range(4):
        script.step()
        script.watch.checkpointer_stepped(None)
    assert script.watch.done == 4


def test_a_state_that_cannot_be_saved_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()

    class Odd:
        def __init__(self) -> None:
            self.state = {"model": script.model, "odd": object()}

        def components(self) -> Mapping[str, Any]:
            from deepvm.errors import CheckpointError

            raise CheckpointError("odd has no state_dict" + "x" * 1000)

        def close(self, *_: Any, **__: Any) -> None: ...

    script.watch.checkpointer = Odd()
    found = script.until_finished()
    assert (found["savable"], len(found["why"])) == (False, 500)
    assert found["components"] == {"model": (100, None), "optimizer": (100, None)}


def test_frozen_layers_are_parameters_that_are_not_trained() -> None:
    script = Script()
    script.model[0].requires_grad_(False)
    found = script.until_finished()
    assert (found["parameters"], found["trainable_parameters"], found["gradient_bytes"]) == (25, 5, 20)


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp32")]
)
def test_precision_is_that_of_the_largest_parameter(dtype: torch.dtype, precision: str) -> None:
    script = Script()
    script.model[0].to(dtype)
    assert watch_module._precision(list(script.model.parameters())) == precision
    assert watch_module._precision([]) == "fp32"


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_precision_is_that_of_autocast(dtype: torch.dtype, precision: str) -> None:
    script = Script(warmup=1)
    with torch.autocast("cpu", dtype):
        script.forward()
    script.step()
    assert script.until_finished()["precision"] == precision


def test_fsdp_is_recognised_by_its_modules() -> None:
    class FSDPLinear(nn.Linear): ...

    script = Script()
    script.model = nn.Sequential(FSDPLinear(4, 1))
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
    assert script.until_finished()["fsdp"] is True


def test_only_the_thread_that_trains_waits_for_data() -> None:
    script = Script()
    count = main_thread_waits(script.watch)
    loader = threading.Thread(target=count, args=(5.0,))
    loader.start()
    loader.join()
    assert script.watch.seen["batches"] == 0
    count(0.5)
    assert script.watch.seen["batches"] == 1
    assert script.watch.describe() == "1 batches"


def test_nothing_seen_is_said() -> None:
    assert Script().watch.describe() == "no forward pass and no batch"
