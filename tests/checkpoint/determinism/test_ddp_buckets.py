"""A DDP network whose buckets are in their final order before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepvm.checkpoint import with_final_buckets
from deepvm.errors import UsageError


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("own", [False, True])
def test_nothing_but_the_order_of_buckets_changes(group: None, own: bool) -> None:
    model = Two()
    forward: Any = model.forward
    if own:
        model.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    x = torch.ones(4, 3)
    expected, generator = model(x), torch.get_rng_state()
    network = DistributedDataParallel(model)
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda _, name=name: arrived.append(name))
    assert with_final_buckets(network) is network
    assert sorted(arrived) == ["first.weight", "second.bias", "second.weight"]  # DDP learned their order
    assert torch.equal(torch.get_rng_state(), generator)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    assert torch.equal(network(x), expected)
    assert ("forward" in model.__dict__) == own
    network(x).sum().backward()
    with pytest.raises(UsageError, match="there are gradients already: call with_final_buckets before the first step"):
        with_final_buckets(network)


def test_a_network_of_one_parameter_is_like_any_other(group: None) -> None:
    network = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    assert with_final_buckets(network).module.weight.grad is None


def test_only_a_network_with_buckets_has_them() -> None:
    with pytest.raises(UsageError, match="a Linear has no buckets: pass the DistributedDataParallel itself"):
        with_final_buckets(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
