"""restore(lazy=True): the first step begins while the checkpoint still comes in, and ends as if it had been there."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer, resumable
from deepvm.checkpoint.restore.pending import PendingParameter
from deepvm.errors import CheckpointError, StoreUnavailable
from deepvm.memnode import MemoryNode
from deepvm.store.base import Manifest
from deepvm.store.files.store import FileStore
from deepvm.store.safetensors import read_header
from deepvm.store.verify import copy as copy_store
from tests.support.waiting import wait_until

BLOCK = 64 * 1024
WAIT_S = 10.0


class Gated(FileStore):
    """A file store of which single chunks are held back until the test lets them go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[int] = []
        self.held: Callable[[int], bool] = lambda chunk: False
        self.broken: Callable[[int], bool] = lambda chunk: False
        self._changed = threading.Condition()

    def let_go(self, held: Callable[[int], bool] = lambda chunk: False) -> None:
        with self._changed:
            self.held = held
            self._changed.notify_all()

    def map(self, manifest: Manifest) -> None:
        """As on a network's disk: its bytes have to be read."""

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        with self._changed:
            self.asked.append(chunk)
            assert self._changed.wait_for(lambda: not self.held(chunk), WAIT_S)
        if self.broken(chunk):
            raise StoreUnavailable(f"chunk {chunk} cannot be read")
        super().read_chunk(manifest, chunk, into)


class Net(torch.nn.Module):
    """Layers that each fill chunks of their own, tied weights, a weight that its owner never uses, a spare expert."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.expert = torch.nn.Linear(256, 256)  # never runs
        self.last = torch.nn.Linear(256, 256)  # registered before what runs before it
        self.first = torch.nn.Embedding(300, 256)
        self.norm = torch.nn.BatchNorm1d(256)
        self.attention = torch.nn.MultiheadAttention(256, 4, batch_first=True)
        self.head = torch.nn.Linear(256, 300, bias=False)
        self.head.weight = self.first.weight
        self.lent = torch.nn.Linear(256, 256, bias=False)  # the model reaches into it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm((x @ self.lent.weight).mean(dim=1))
        return self.head(self.last(x))


class Work:
    def __init__(self, seed: int = 0) -> None:
        self.model = Net(seed)
        self.optimizer = torch.optim.AdamW([p for n, p in self.model.named_parameters() if "expert" not in n], lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def loss(self, number: int) -> torch.Tensor:
        x = torch.randint(0, 300, (4, 8), generator=torch.Generator().manual_seed(number))
        return self.model(x).square().mean()

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(number)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())

    def truth(self) -> list[tuple[str, bytes]]:
        found = [(k, v.detach().numpy().tobytes()) for k, v in self.model.state_dict().items()]
        for index, values in sorted(self.optimizer.state_dict()["state"].items()):
            found += [(f"{index}.{k}", v.numpy().tobytes()) for k, v in values.items()]
        return [*found, ("rates", repr(self.schedule.state_dict()).encode())]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Work, Path]:
    """A run of three steps, saved after the second; and its directory."""
    work = Work()
    with Checkpointer(work.state, str(tmp_path), on_error="raise") as ckpt:
        for number in range(2):
            work.step(number)
        ckpt.save(2).wait("durable", WAIT_S)
    return work, tmp_path


def chunks_of(store: FileStore, *wanted: str) -> set[int]:
    """The chunks that only tensors of these names have bytes in."""
    manifest = store.manifest("default", 2)
    mine: set[int] = set()
    others: set[int] = {0}
    for tensor in read_header(store, manifest).tensors:
        spans = range(
            tensor.offset // manifest.chunk_bytes, (tensor.offset + tensor.size_bytes - 1) // manifest.chunk_bytes + 1
        )
        (mine if tensor.name.startswith(wanted) else others).update(spans)
    return mine - others


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepvm.checkpoint.save.store_transfer.DEFAULT_CHUNK_BYTES", BLOCK)


def test_a_run_continues_as_if_its_state_had_been_there(saved: tuple[Work, Path]) -> None:
    work, place = saved
    again = Work(seed=1)
    with Checkpointer(again.state, str(place)) as ckpt:
        assert ckpt.restore(lazy=True) == 2
        for number in (2, 3):
            assert again.step(number) == work.step(number)
    assert again.truth() == work.truth()


def test_afterwards_nothing_of_it_is_left_on_the_model(saved: tuple[Work, Path]) -> None:
    again = Work(seed=1)
    with Checkpointer(again.state, str(saved[1])) as ckpt:
        ckpt.restore(lazy=True)
        again.step(2)
        ours = [m for m in again.model.modules() if m._forward_pre_hooks and m is not again.model.expert]
        assert not [m for m in ours if m is not again.model.lent and m is not again.model.attention.out_proj]
        assert all(type(p) is torch.nn.Parameter and not vars(p) for p in again.model.parameters())
        assert len(again.optimizer._optimizer_step_pre_hooks) == 1  # the checkpointer's own
    assert not any(m._forward_pre_hooks for m in again.model.modules())


def test_a_module_waits_only_for_its_own_tensors(saved: tuple[Work, Path]) -> None:
    work, place = saved
    store = Gated(place)
    again = Work(seed=1)
    late = chunks_of(store, "model.last", "model.head", "optimizer")
    store.held = late.__contains__
    with Checkpointer(again.state, store) as ckpt:
        ckpt.restore(lazy=True)
        x = torch.arange(8).view(1, 8)
        got = again.model.first(x)
        again.model.attention(got, got, got)
        assert torch.equal(got, work.model.first(x))
        assert type(again.model.last.weight) is PendingParameter
        store.let_go()
        assert again.loss(2) == work.loss(2)


def test_what_runs_first_is_fetched_first_and_what_never_ran_last(saved: tuple[Work, Path]) -> None:
    store = Gated(saved[1])
    again = Work(seed=1)
    with Checkpointer(again.state, store) as ckpt:
        store.asked.clear()
        ckpt.restore(lazy=True)
        ckpt.finish_restore()
    first, last = chunks_of(store, "model.first", "model.head"), chunks_of(store, "model.last")
    moments, expert = chunks_of(store, "optimizer.state"), chunks_of(store, "model.expert")
    assert all((first, last, moments, expert))
    places = [sum(map(store.asked.index, chunks)) / len(chunks) for chunks in (first, last, moments, expert)]
    assert places == sorted(places)


@pytest.mark.parametrize("fast", [True, False])
def test_what_would_come_within_a_moment_leaves_the_cores_to_the_first_forward(
    saved: tuple[Work, Path], monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr("deepvm.checkpoint.restore.chunk_reader.MOMENT_S", 60.0 if fast else 0.0)
    store = Gated(saved[1])
    again = Work(seed=1)
    moments = chunks_of(store, "optimizer.state")
    with Checkpointer(again.state, store) as ckpt:
        ckpt.restore(lazy=True)
        eager = chunks_of(store, "model.first") if fast else moments
        wait_until(lambda: eager <= set(store.asked), "the chunks that come by themselves", timeout_s=WAIT_S)
        assert not fast or moments.isdisjoint(store.asked)
        assert again.step(2) == saved[0].step(2)
        assert moments <= set(store.asked)


def test_buffers_lie_together_so_that_they_come_at_once(tmp_path: Path) -> None:
    layers = [part for _ in range(8) for part in (torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256))]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer({"model": model, "optimizer": optimizer}, str(tmp_path), on_error="raise") as ckpt:
        model(torch.randn(4, 256)).sum().backward()
        optimizer.step()
        ckpt.save(2).wait("durable", WAIT_S)
    store = Gated(tmp_path)
    tensors = read_header(store, store.manifest("default", 2)).tensors
    running = [t.offset // BLOCK for t in tensors if "running" in t.name]
    assert max(running) - min(running) <= 1


def test_any_use_of_a_parameter_waits_for_it(saved: tuple[Work, Path]) -> None:
    work, place = saved
    store = Gated(place)
    again = Work(seed=1)
    store.held = chunks_of(store, "model.lent").__contains__
    with Checkpointer(again.state, store) as ckpt:
        ckpt.restore(lazy=True)
        lent = again.model.lent.weight
        assert lent.shape == (256, 256)
        assert lent.grad is None
        assert lent.requires_grad  # none of these needs its content
        assert type(lent) is PendingParameter
        with ThreadPoolExecutor(1) as pool:
            used = pool.submit(lambda: lent.detach().clone())
            wait_until(lambda: any(map(store.held, store.asked)), "a read that is held back")
            assert not used.done()
            store.let_go()
            assert torch.equal(used.result(WAIT_S), work.model.lent.weight)
        assert type(lent) is torch.nn.Parameter


def _saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),  # noqa: S301 - our own
    "torch.save": _saved_and_loaded,
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_before_the_first_forward_has_the_real_values_and_no_hooks_that_work(
    saved: tuple[Work, Path], way: str, mapped: bool
) -> None:
    work, place = saved
    again = Work(seed=1)
    with Checkpointer(again.state, str(place) if mapped else Gated(place)) as ckpt:
        ckpt.restore(lazy=True)
        assert type(again.model.last.weight) is PendingParameter
        made = COPIES[way](again.model)
        assert all(type(p) is torch.nn.Parameter and not vars(p) for p in made.parameters())
        for name, value in made.state_dict().items():
            assert torch.equal(value, work.model.state_dict()[name])
        assert made.head.weight is made.first.weight
        made(torch.zeros(2, 4, dtype=torch.long))
        assert again.step(2) == work.step(2)
    assert again.truth() == work.truth()


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_one_parameter_waits_for_it(saved: tuple[Work, Path], way: str) -> None:
    again = Work(seed=1)
    with Checkpointer(again.state, Gated(saved[1])) as ckpt:
        ckpt.restore(lazy=True)
        assert type(again.model.expert.weight) is PendingParameter
        made = COPIES[way](again.model.expert.weight)
        assert type(made) is torch.nn.Parameter
        assert torch.equal(made, saved[0].model.expert.weight)


def test_the_optimizers_settings_are_there_at_once_and_its_state_when_it_is_asked_for(saved: tuple[Work, Path]) -> None:
    work, place = saved
    store = Gated(place)
    again = Work(seed=1)
    store.held = set(sorted(chunks_of(store, "optimizer"))[:3]).__contains__  # one reader is left
    with Checkpointer(again.state, store) as ckpt:
        ckpt.restore(lazy=True)
        assert again.optimizer.param_groups[0]["lr"] == work.optimizer.param_groups[0]["lr"]
        again.loss(2).backward()
        again.optimizer.param_groups[0]["lr"] = 0.125  # a schedule of the user's own
        threading.Timer(0.2, store.let_go).start()
        assert again.optimizer.state_dict()["state"].keys() == work.optimizer.state_dict()["state"].keys()
        assert again.optimizer.param_groups[0]["lr"] == 0.125


def _reset_momentum(work: Work) -> None:
    for values in work.optimizer.state.values():
        values["exp_avg"].zero_()


def _set_one_state(work: Work) -> None:
    weight = work.model.last.weight
    state = work.optimizer.state[weight]
    work.optimizer.state[weight] = {name: torch.full_like(value, 0.5) for name, value in state.items()}


def _load_another_state(work: Work) -> None:
    other = Work(seed=5)
    other.step(7)
    work.optimizer.load_state_dict(other.optimizer.state_dict())


def _keep_a_copy(work: Work) -> None:
    kept = copy.deepcopy(work.optimizer.state_dict()["state"])
    assert kept.keys() == copy.deepcopy(work.optimizer).state_dict()["state"].keys()
    assert len(work.optimizer.state) == len(kept)


@pytest.mark.parametrize("change", [_reset_momentum, _set_one_state, _load_another_state, _keep_a_copy])
def test_a_change_of_the_optimizers_state_before_the_first_step_is_a_change_of_what_was_restored(
    saved: tuple[Work, Path], change: Callable[[Work], None]
) -> None:
    lazy, eager = Work(seed=1), Work(seed=1)
    for work in (lazy, eager):
        with Checkpointer(work.state, Gated(saved[1])) as ckpt:
            ckpt.restore(lazy=work is lazy)
            change(work)
            work.step(2)
            ckpt.finish_restore()
        assert type(work.optimizer.state) is defaultdict
    assert lazy.truth() == eager.truth()


def test_a_swapped_parameter_takes_its_bytes_along(saved: tuple[Work, Path]) -> None:
    work, place = saved
    for store in (Gated(place), str(place)):
        again = Work(seed=1)
        with Checkpointer(again.state, store) as ckpt:
            ckpt.restore(lazy=True)
            expert, last = again.model.expert.weight, again.model.last.weight
            torch.utils.swap_tensors(expert, last)
            assert torch.equal(expert, work.model.last.weight)
            assert torch.equal(last, work.model.expert.weight)
            ckpt.finish_restore()
        assert torch.equal(expert, work.model.last.weight)
        assert torch.equal(last, work.model.expert.weight)


def test_bytes_on_their_way_into_a_parameter_that_was_swapped_for_another_go_nowhere_else(
    saved: tuple[Work, Path],
) -> None:
    for store in (Gated(saved[1]), str(saved[1])):
        again = Work(seed=1)
        with Checkpointer(again.state, store) as ckpt:
            ckpt.restore(lazy=True)
            torch.utils.swap_tensors(again.model.expert.weight, torch.nn.Parameter(torch.full((256, 256), 5.0)))
            others = [torch.full((256, 256), 3.0) for _ in range(8)]
            ckpt.finish_restore()
        assert (again.model.expert.weight == 5.0).all()
        assert all((other == 3.0).all() for other in others)


def test_a_process_that_was_forked_meanwhile_is_refused_at_once(saved: tuple[Work, Path]) -> None:
    again = Work(seed=1)
    with Checkpointer(again.state, Gated(saved[1])) as ckpt:
        ckpt.restore(lazy=True)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                again.model.expert.weight.sum()
            except CheckpointError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            assert b"call finish_restore() before starting processes" in answer.read()
        os.waitpid(child, 0)


def test_what_others_keep_stays_theirs_when_the_optimizers_state_has_come(tmp_path: Path) -> None:
    work, again = Work(), Work(seed=1)
    average = torch.randn(512, 512)
    with Checkpointer({**work.state, "best": {"average": average}}, str(tmp_path), on_error="raise") as ckpt:
        work.step(0)
        ckpt.save(1).wait("durable", WAIT_S)
    with Checkpointer({**again.state, "best": {"average": torch.zeros(512, 512)}}, Gated(tmp_path)) as ckpt:
        assert ckpt.restore(lazy=True) == 1
        again.step(1)
        assert torch.equal(ckpt.state["best"]["average"], average)
    assert torch.equal(ckpt.state["best"]["average"], average)


def test_a_save_while_the_state_comes_in_is_whole(saved: tuple[Work, Path], tmp_path: Path) -> None:
    work, place = saved
    again = Work(seed=1)
    with Checkpointer(again.state, str(place), on_error="raise") as ckpt:
        ckpt.restore(lazy=True)
        ckpt.save(3).wait("durable", WAIT_S)
    third = Work(seed=2)
    with Checkpointer(third.state, str(place)) as ckpt:
        assert ckpt.restore() == 3
    assert third.truth() == work.truth()


def test_a_failure_says_so_at_once_and_a_second_restore_falls_back(saved: tuple[Work, Path]) -> None:
    work, place = saved
    store = Gated(place)
    again = Work(seed=1)
    lost = chunks_of(store, "model.last")
    with Checkpointer(again.state, store) as ckpt:
        store.held = lost.__contains__
        ckpt.restore(lazy=True)
        store.broken = lost.__contains__
        store.let_go()
        for _ in range(2):
            with pytest.raises(CheckpointError, match="not whole"):
                again.loss(2)
        store.broken = lambda chunk: False
        assert ckpt.restore() == 2
        assert again.loss(2) == work.loss(2)


def test_a_copy_that_fails_at_once_is_passed_over(saved: tuple[Work, Path], tmp_path: Path) -> None:
    work, place = saved
    with Checkpointer(work.state, str(place), run="both", on_error="raise") as ckpt:
        ckpt.save(7).wait("durable", WAIT_S)
    copy_store(FileStore(place), FileStore(place / "further"), "both", 7)
    store, bad = FileStore(place), place / "both" / "step-000000000007.safetensors"
    tensors = read_header(store, store.manifest("both", 7)).tensors
    data = bytearray(bad.read_bytes())
    data[next(t.offset for t in tensors if t.name == "model.norm.running_mean")] ^= 1  # buffers are not awaited
    bad.write_bytes(data)
    again = Work(seed=1)
    with Checkpointer(again.state, [str(place), str(place / "further")], run="both") as ckpt:
        assert ckpt.restore(lazy=True) == 7
        assert ckpt.restored is not None
        assert "further" in ckpt.restored.store
        assert again.loss(2) == work.loss(2)


def test_a_damaged_header_or_another_model_changes_nothing(saved: tuple[Work, Path]) -> None:
    other = torch.nn.Linear(3, 3)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with Checkpointer({"model": other}, str(saved[1])) as ckpt, pytest.raises(CheckpointError, match=r"first\.weight"):
        ckpt.restore(lazy=True)
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())
    assert type(other.weight) is torch.nn.Parameter


@pytest.mark.parametrize("lazy", [False, True])
def test_a_loader_whose_position_does_not_fit_leaves_the_model_alone(tmp_path: Path, lazy: bool) -> None:
    def state(samples: int) -> dict[str, Any]:
        data = torch.utils.data.DataLoader(list(range(samples)), batch_size=2)  # type: ignore[arg-type, var-annotated]
        return {"model": torch.nn.Linear(3, 3), "loader": resumable(data, seed=1)}

    then, now = state(12), state(10)
    next(iter(then["loader"]))
    with Checkpointer(then, str(tmp_path), on_error="raise") as ckpt:
        ckpt.save(1).wait("durable", WAIT_S)
    before = now["model"].weight.detach().clone()
    with Checkpointer(now, str(tmp_path)) as ckpt, pytest.raises(CheckpointError, match="12"):
        ckpt.restore(lazy=lazy)
    assert torch.equal(now["model"].weight, before)


def test_evaluation_needs_no_optimizer(saved: tuple[Work, Path]) -> None:
    work, place = saved
    store = Gated(place)
    again = Net(seed=1).eval()
    store.held = chunks_of(store, "optimizer").__contains__
    with torch.no_grad(), Checkpointer({"model": again}, store) as ckpt:
        ckpt.restore(lazy=True)
        x = torch.arange(8).view(1, 8)
        assert torch.equal(again(x), work.model.eval()(x))
        store.let_go()


@pytest.mark.filterwarnings("ignore::UserWarning")  # inside of the compiler
def test_a_compiled_model_is_refused_and_one_compiled_later_is_right(saved: tuple[Work, Path]) -> None:
    work, place = saved
    again = Work(seed=1)
    compiled = torch.compile(again.model, backend="eager")
    with Checkpointer({"model": compiled}, str(place)) as ckpt, pytest.raises(CheckpointError, match="compiled"):
        ckpt.restore(lazy=True)
    with Checkpointer(again.state, str(place)) as ckpt:
        ckpt.restore(lazy=True)
        x = torch.arange(16).view(2, 8)
        assert torch.equal(torch.compile(again.model, backend="eager")(x), work.model(x))


def test_from_memory_nodes_one_of_which_is_lost_meanwhile() -> None:
    work, again = Work(), Work(seed=1)
    fields: dict[str, Any] = {"capacity_bytes": 64 * 2**20, "block_bytes": BLOCK}
    with MemoryNode(**fields) as one, MemoryNode(**fields) as other:
        url = f"memory://{one.address},{other.address}?replicas=2"
        with Checkpointer(work.state, url, on_error="raise") as ckpt:
            work.step(0)
            ckpt.save(1).wait("remote", WAIT_S)
        with Checkpointer(again.state, url) as ckpt:
            assert ckpt.restore(lazy=True) == 1
            one.stop()
            for number in (1, 2):
                assert again.step(number) == work.step(number)
    assert again.truth() == work.truth()
