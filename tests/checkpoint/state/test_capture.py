"""What one Capture takes at a later save is what a new one would take: whatever has changed in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepvm.checkpoint.state.capture import Capture, Captured
from deepvm.errors import CheckpointError


class Work:
    """A model with a buffer, two groups of parameters, and momentum for all but the last parameter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential()
        self.model.add_module("body", torch.nn.Linear(4, 4))
        self.model.add_module("norm", torch.nn.BatchNorm1d(4))
        self.model.add_module("head", torch.nn.Linear(4, 4))
        self.model.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.model.register_parameter("phase", torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)))
        self.model.register_parameter("gain", torch.nn.Parameter(torch.ones(2, dtype=torch.float16)))
        groups = [{"params": self.body, "lr": 0.1}, {"params": self.head, "lr": 0.01}]
        self.optimizer = torch.optim.SGD(groups, momentum=0.9)
        for parameter in [*self.body, self.head[0]]:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.plain = {"matrix": torch.randn(3, 3)}
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "plain": self.plain}

    @property
    def body(self) -> list[torch.nn.Parameter]:
        return list(self.model.get_submodule("body").parameters())

    @property
    def head(self) -> list[torch.nn.Parameter]:
        return list(self.model.get_submodule("head").parameters())


def replace_state_dict(work: Work) -> None:
    own = work.model.state_dict
    work.model.state_dict = lambda: {name: value.clone() for name, value in own().items()}  # type: ignore[method-assign]


def replace_state_dict_of_the_optimizer(work: Work) -> None:
    own = work.optimizer.state_dict
    work.optimizer.state_dict = lambda: {**own(), "extra": 42}  # type: ignore[method-assign]


def give_extra_state_to_a_layer(work: Work) -> None:
    work.model.get_submodule("body").get_extra_state = lambda: {"rank": 8}  # type: ignore[method-assign]


class Versioned(torch.nn.Linear):
    _version = 2


def change_the_version_of_a_layer(work: Work) -> None:
    work.model.get_submodule("body").__class__ = Versioned


def move_a_parameter_to_the_other_group(work: Work) -> None:
    first, second = work.optimizer.param_groups
    first["params"].append(second["params"].pop(0))


def split_a_group(work: Work) -> None:
    last = work.optimizer.param_groups[-1]["params"].pop()
    work.optimizer.add_param_group({"params": [last], "lr": 0.001})


def swap_parameters_within_a_group(work: Work) -> None:
    work.optimizer.param_groups[0]["params"].reverse()


def reinterpret_as_another_type(work: Work) -> None:
    gain = work.model.get_parameter("gain")
    gain.data = gain.data.view(torch.bfloat16)


def transpose_in_place(work: Work) -> None:
    work.body[0].data = work.body[0].data.t()


def transpose_a_plain_tensor(work: Work) -> None:
    work.plain["matrix"].t_()


def conjugate(work: Work) -> None:
    phase = work.model.get_parameter("phase")
    phase.data = phase.data.conj()


def move_state_to_another_parameter(work: Work) -> None:
    state = work.optimizer.state
    state[work.head[1]] = state.pop(work.head[0])


def rename_state(work: Work) -> None:
    kept = work.optimizer.state[work.body[0]]
    kept["velocity"] = kept.pop("momentum_buffer")


def change_the_layout_of_parameters_only(work: Work) -> None:
    work.body[0].data = work.body[0].data.t().contiguous().t()


def rename_a_layer(work: Work) -> None:
    work.model.classifier = work.model.head
    del work.model.head


def move_a_buffer_between_layers(work: Work) -> None:
    norm = work.model.get_submodule("norm")
    work.model.get_submodule("head").register_buffer("num_batches_tracked", norm.num_batches_tracked)
    del norm.num_batches_tracked


def make_a_buffer_persistent(work: Work) -> None:
    work.model.register_buffer("scratch", work.model.scratch, persistent=True)  # type: ignore[arg-type]


def hook_into_state_dict(work: Work) -> None:
    work.model.register_state_dict_post_hook(lambda *found: found[1].update(x=torch.ones(1)))


def hook_into_state_dict_of_a_layer(work: Work) -> None:
    work.model.get_submodule("body").register_state_dict_post_hook(lambda *found: found[1].update(y=torch.ones(1)))


def hook_into_state_dict_of_the_optimizer(work: Work) -> None:
    work.optimizer.register_state_dict_post_hook(lambda _, found: {**found, "extra": 1})


def remove_a_bias(work: Work) -> None:
    work.model.get_submodule("body").bias = None


def replace_a_parameter(work: Work) -> None:
    work.model.get_submodule("body").weight = torch.nn.Parameter(torch.full((4, 4), 7.0))


def move_the_memory_of_a_parameter(work: Work) -> None:
    storage = work.body[0].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(8 * size)


def change_a_learning_rate(work: Work) -> None:
    work.optimizer.param_groups[0]["lr"] = 0.5


def change_nothing(_: Work) -> None:
    pass


CHANGES = [value for value in list(globals().values()) if getattr(value, "__annotations__", {}).get("return") == "None"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("parts", [("model", "optimizer", "plain"), ("optimizer",)], ids="-".join)
def test_a_later_capture_is_that_of_a_new_one(change: Callable[[Work], None], parts: tuple[str, ...]) -> None:
    work = Work()
    state = {name: work.state[name] for name in parts}
    capture = Capture()
    capture.take(state)
    assert capture.take(state).same  # or nothing is tested here
    change(work)
    assert described(capture.take(state)) == described(Capture().take(state))


def described(captured: Captured) -> Any:
    tensors = {
        name: (t.dtype, tuple(t.shape), t.stride(), t.flatten().view(torch.uint8).tolist())
        for name, t in captured.tensors.items()
    }
    return captured.texts, tensors


def test_a_storage_that_became_too_small_for_its_tensor_is_refused() -> None:
    work, capture = Work(), Capture()
    capture.take(work.state)
    storage = work.body[0].untyped_storage()
    storage.resize_(storage.nbytes() // 4)
    with pytest.raises(CheckpointError, match="memory was freed"):
        capture.take(work.state)


def test_a_state_that_trained_is_not_walked_again() -> None:
    work, capture = Work(), Capture()
    before = capture.take(work.state)
    work.optimizer.step()  # in place
    work.model.train()
    work.model.get_submodule("norm")(torch.randn(2, 4))
    assert capture.take(work.state).same
    assert before.tensors is capture.take(work.state).tensors
