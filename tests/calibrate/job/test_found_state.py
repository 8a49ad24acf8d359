"""The state of a script without a Checkpointer: which modules, tensors and names are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from deepvm.calibrate.job.found_state import FoundState, estimate


@contextmanager
def found(*optimizers: torch.optim.Optimizer) -> Iterator[FoundState]:
    state = FoundState(optimizers, None)
    try:
        yield state
    finally:
        state.close()


def test_the_outermost_module_is_the_model_with_its_buffers_and_frozen_layers() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    body[0].requires_grad_(False)
    model = Wrapper(body)
    optimizer = torch.optim.SGD(body[1].parameters(), lr=0.1)
    with found(optimizer) as state:
        assert state.modules == [model]
        assert [*state.components()][:2] == ["model", "optimizer"]
        assert len(state.parameters) == 4
        assert len(state.optimized) == 2
        assert len(state.buffers) == 3


def test_several_parts_are_named_by_the_scripts_variables() -> None:
    encoder, decoder = nn.Linear(3, 4), nn.Linear(4, 3)
    fast = torch.optim.SGD(encoder.parameters(), lr=0.1)
    optimizers = [fast, torch.optim.Adam(decoder.parameters())]
    with found(*optimizers) as state:
        assert [*state.components()][:4] == ["encoder", "decoder", "fast", "optimizer2"]


def test_a_container_of_parts_of_the_model_is_not_saved_twice() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    kept = nn.ModuleList([model[0]])  # such as a list of blocks for a loss
    with found(torch.optim.SGD(model.parameters(), lr=0.1)) as state:
        assert state.modules == [model]
    assert len(kept) == 1


def test_parameters_without_a_module_are_a_component_of_their_own() -> None:
    model, parameters = nn.Linear(3, 3), nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([*model.parameters(), parameters], lr=0.1)
    with found(optimizer) as state:
        components = state.components()
        assert components["parameters"] == [parameters]
        assert sum(p.numel() for p in state.parameters) == 12 + 5


def test_tied_weights_count_once_and_what_changes_is_told_from_what_does_not() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("nothing", torch.zeros(0))
            self.register_buffer("constant", torch.ones(11))

    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    with found(optimizer) as state:
        model.embedding.weight.grad = torch.ones(7, 3)
        optimizer.step()
        before = state.size()
        optimizer.step()
        sizes = state.size().by_component(before)
        assert sizes["model"] == (4 * (21 + 11), 4 * 21)
        assert sizes["optimizer"][1] == 2 * 4 * 21 + 4  # both averages and the number of the step
        assert state.optimizer_bytes == 2 * 4 * 21 + 4
        assert estimate(state) == {"model": (4 * (21 + 11), None), "optimizer": (2 * 4 * 21 + 4, None)}
        assert sizes["header"][0] == sizes["header"][1] > 0


def test_half_precision_and_integers_have_the_bytes_of_their_types() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    with found(torch.optim.SGD(model.parameters(), lr=0.1)) as state:
        size = state.size()
        assert size.by_component(size)["model"] == (2 * 20 + 8 * 3, 0)


def test_an_optimizer_without_parameters_has_an_empty_state() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(0))], lr=0.1)
    with found(optimizer) as state:
        assert state.modules == []
        assert state.optimizer_bytes == 0
        assert pytest.approx(0) == state.size().by_component(state.size())["parameters"][0]
