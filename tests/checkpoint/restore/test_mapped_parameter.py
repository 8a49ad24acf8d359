"""Parameters that use a mapped file until the optimizer steps: whoever else sees their memory notices nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.restore.mapped_parameter import MappedParameter
from deepvm.errors import CheckpointError

WAIT_S = 10.0
CHUNK_BYTES = 64 * 1024


class Work:
    def __init__(self, value: float) -> None:
        self.model = torch.nn.Linear(256, 256)
        torch.nn.init.constant_(self.model.weight, value)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.model.weight

    def forward(self) -> torch.Tensor:
        return self.model(torch.ones(2, 256)).sum()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()


@pytest.fixture(params=[1, 4])
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Work, Path]:
    """On one core nobody verifies a mapped file but whoever waits for it; on more, others help."""
    monkeypatch.setattr("os.cpu_count", lambda: request.param)
    monkeypatch.setattr("deepvm.checkpoint.save.store_transfer.DEFAULT_CHUNK_BYTES", CHUNK_BYTES)
    torch.manual_seed(0)
    work = Work(3.0)
    work.step()
    with Checkpointer(work.state, str(tmp_path), on_error="raise") as ckpt:
        ckpt.save(1).wait("durable", WAIT_S)
    return work, tmp_path


@contextmanager
def restored(place: Path, work: Work) -> Iterator[Checkpointer]:
    with Checkpointer(work.state, str(place)) as ckpt:
        assert ckpt.restore(lazy=True) == 1
        yield ckpt


def test_a_parameter_uses_the_mapped_file_and_is_copied_before_the_first_step(saved: tuple[Work, Path]) -> None:
    work, place = saved
    again = Work(0.0)
    home = again.weight.data_ptr()
    with restored(place, again):
        assert torch.equal(again.forward(), work.forward())
        assert again.weight.data_ptr() != home
        again.step()
        assert again.weight.data_ptr() == home
    work.step()
    assert torch.equal(again.weight, work.weight)


def test_a_parameter_that_was_never_used_is_copied_too(saved: tuple[Work, Path]) -> None:
    work, place = saved
    again = Work(0.0)
    home = again.weight.data_ptr()
    with restored(place, again) as ckpt:
        ckpt.finish_restore()
        assert again.weight.data_ptr() == home
        assert torch.equal(again.weight, work.weight)


def test_what_is_written_to_it_meanwhile_is_kept_and_does_not_reach_the_file(saved: tuple[Work, Path]) -> None:
    work, place = saved
    file = next(place.rglob("*.safetensors"))
    before = file.read_bytes()
    again = Work(0.0)
    with restored(place, again):
        again.forward()
        again.weight.data.mul_(2)  # no version tells of this
    assert torch.equal(again.weight, 2 * work.weight)
    assert file.read_bytes() == before


def test_a_view_taken_meanwhile_stays_a_view(saved: tuple[Work, Path]) -> None:
    work, place = saved
    again = Work(0.0)
    with restored(place, again):
        again.forward()
        view = again.weight.detach().t()
        again.step()
        work.step()
        assert torch.equal(view.t(), work.weight)
        again.step()
        work.step()
    assert torch.equal(again.weight, work.weight)
    assert torch.equal(view.t(), work.weight)


def test_memory_that_somebody_else_sees_is_filled_where_it_is(saved: tuple[Work, Path]) -> None:
    work, place = saved
    again = Work(0.0)
    view = again.weight.detach()
    with restored(place, again):
        again.forward()
        assert torch.equal(view, work.weight)


def test_memory_shared_with_other_processes_is_filled_where_it_is(saved: tuple[Work, Path]) -> None:
    work, place = saved
    again = Work(0.0)
    again.model.share_memory()
    home = again.weight.data_ptr()
    with restored(place, again):
        again.forward()
        assert again.weight.data_ptr() == home
        assert torch.equal(again.weight, work.weight)


def test_other_memory_given_to_it_meanwhile_is_left_to_it(saved: tuple[Work, Path]) -> None:
    work, place = saved
    again = Work(0.0)
    with restored(place, again):
        again.forward()
        again.weight.data = torch.full((256, 256), 7.0)
    assert torch.equal(again.weight, torch.full((256, 256), 7.0))
    assert torch.equal(again.model.bias, work.model.bias)


def test_a_second_restore_starts_from_own_memory(saved: tuple[Work, Path]) -> None:
    work, place = saved
    again = Work(0.0)
    home = again.weight.data_ptr()
    with restored(place, again) as ckpt:
        again.forward()
        assert ckpt.restore() == 1
        assert again.weight.data_ptr() == home
    assert torch.equal(again.weight, work.weight)


def test_damaged_bytes_are_not_mapped(saved: tuple[Work, Path]) -> None:
    _, place = saved
    file = next(place.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[CHUNK_BYTES + 4] ^= 1
    file.write_bytes(data)
    again = Work(0.0)

    def use() -> None:
        """The restore tells, or what needs the bytes: whichever comes first."""
        with restored(place, again):
            again.forward()

    with pytest.raises(CheckpointError, match="not what was saved"):
        use()


def _averaged(work: Work) -> object:
    backup = work.weight.data
    work.weight.data = torch.full_like(work.weight, 5.0)
    return backup


def _halved(work: Work) -> object:
    before = work.model.state_dict()
    work.model.half()
    return before


def _grown(work: Work) -> object:
    before = work.model.state_dict()
    work.weight.data = torch.full((512, 256), 5.0)
    return before


def _turned(work: Work) -> object:
    work.weight.data = work.weight.data.t()
    return None


@pytest.mark.parametrize("change", [_averaged, _halved, _grown, _turned])
def test_what_the_user_put_into_a_parameter_stays_there(
    saved: tuple[Work, Path], change: Callable[[Work], object]
) -> None:
    work, place = saved
    again = Work(0.0)
    with restored(place, again) as ckpt:
        assert torch.equal(again.forward(), work.forward())
        kept = change(again)
        put = again.weight.detach().clone()
        ckpt.finish_restore()
        assert again.weight.dtype is put.dtype
        assert torch.equal(again.weight, put)
    old = kept["weight"] if isinstance(kept, dict) else kept
    if isinstance(old, torch.Tensor):
        assert torch.equal(old.reshape(256, 256), work.weight)


@pytest.mark.parametrize("viewed", [False, True])
def test_a_parameter_goes_back_to_its_own_memory_unless_there_is_a_view(viewed: bool) -> None:
    parameter, memory = torch.nn.Parameter(torch.zeros(4)), torch.ones(4)
    own = parameter.data_ptr()
    mapped = MappedParameter(parameter, memory)
    mapped.begin()
    assert mapped.begun
    assert parameter.data_ptr() == memory.data_ptr() != own
    views = [parameter.data[:2]] if viewed else []
    assert mapped.end() is not viewed
    assert parameter.data_ptr() == (memory.data_ptr() if viewed else own)
    assert parameter.tolist() == [1.0] * 4
    assert len(views) == viewed


def test_a_parameter_that_was_not_used_yet_is_copied() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    own = parameter.data_ptr()
    mapped = MappedParameter(parameter, torch.ones(4))
    assert not mapped.begun
    assert mapped.end() is True
    assert (parameter.data_ptr(), parameter.tolist()) == (own, [1.0] * 4)
