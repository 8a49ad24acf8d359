"""Generators come back with a checkpoint, for every rank, and a run that would drift says why."""

from __future__ import annotations

import gc
import json
import logging
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from torch.utils.data import DataLoader, TensorDataset

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.determinism import rng_state, run_environment
from deepvm.checkpoint.determinism.component import DETERMINISM, Determinism
from deepvm.errors import CheckpointError, UsageError
from deepvm.memnode import Limits, MemoryNode
from deepvm.store.base import Manifest
from deepvm.store.urls import open_store
from tests.support.checkpoint import rank_processes
from tests.support.checkpoint.rank_processes import run_ranks

MIB = 2**20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=128 * MIB, block_bytes=MIB, limits=Limits(stop_s=0.0)) as node:
        yield f"memory://{node.address}"


@pytest.fixture(autouse=True)
def seeded() -> None:
    gc.collect()  # or a loader of an earlier test might be counted as one that is in use
    rank_processes.seed_all(7)


def drawn() -> list[float]:
    """From every generator, also the halves of normal pairs that they keep for the next time."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        torch.rand(()).item(),
        torch.randn(3).sum().item(),
    ]


# --- generators ---------------------------------------------------------------------------------------------------


def test_every_generator_continues_where_it_was_taken() -> None:
    drawn()
    taken = rng_state.take()
    assert rng_state.names(taken) == ["python", "numpy", "torch"]
    expected = [drawn() for _ in range(3)]
    rank_processes.seed_all(8)
    assert rng_state.put(taken) == []
    assert [drawn() for _ in range(3)] == expected


def test_a_generator_of_another_kind_is_reported_and_the_others_are_set() -> None:
    taken = rng_state.take()
    expected = random.random()
    taken["numpy"] = {**taken["numpy"], "bit_generator": "PCG64"}
    taken["torch"] = taken["torch"][:-8]
    of_torch, of_numpy = rng_state.put(taken)
    assert "torch's generator cannot be set" in of_torch
    assert "PCG64" in of_numpy
    assert random.random() == expected


def test_a_generator_of_another_python_or_without_numpy_is_reported_and_the_others_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = rng_state.take()
    expected, before = torch.rand(()).item(), random.getstate()
    random.random()
    after = random.getstate()
    taken["python"] = {**taken["python"], "version": 2}
    monkeypatch.setitem(sys.modules, "numpy.random", None)
    assert rng_state.put(taken) == [
        "Python's generator was saved with version 2, not 3",
        "NumPy's generator cannot be set: NumPy is not installed",
    ]
    assert before != after == random.getstate()
    assert torch.rand(()).item() == expected


def test_generators_of_gpus_that_are_not_here_are_reported_and_the_others_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    taken = {**rng_state.take(), "cuda": [bytes(16)] * 2}
    expected = drawn()
    assert rng_state.put(taken) == ["generators of 2 GPUs were saved, here are 0 GPUs"]
    assert drawn() == expected


def test_a_run_with_dropout_continues_bit_for_bit_without_a_line_of_user_code(url: str) -> None:
    undisturbed = rank_processes.Noisy()
    with Checkpointer(undisturbed.state, url, run="dropout") as ckpt:
        for step in range(1, 9):
            undisturbed.step()
            if step == 4:
                ckpt.save(4).wait("remote", 20)
    rank_processes.seed_all(99)
    resumed = rank_processes.Noisy()
    resumed.step()
    with Checkpointer(resumed.state, url, run="dropout") as ckpt:
        assert ckpt.restore() == 4
        assert ckpt.status().drift == ()
        resumed.losses.clear()
        for _ in range(4):
            resumed.step()
    assert resumed.losses == undisturbed.losses[4:]
    assert resumed.digest() == undisturbed.digest()


def test_two_ranks_with_generators_of_their_own_continue_bit_for_bit(tmp_path: Path, url: str) -> None:
    undisturbed = run_ranks(2, tmp_path, rank_processes.noisy_steps, url, "two", 8, 4)
    assert undisturbed[0]["losses"] != undisturbed[1]["losses"]
    resumed = run_ranks(2, tmp_path, rank_processes.noisy_resume, url, "two", 4)
    for one, other in zip(undisturbed, resumed, strict=True):
        assert other["losses"] == one["losses"][4:]
        assert other["digest"] == one["digest"]
        assert other["drift"] == ()


def test_more_ranks_than_saved_are_seeded_from_those_there_are_and_it_is_reported(tmp_path: Path, url: str) -> None:
    run_ranks(2, tmp_path, rank_processes.noisy_steps, url, "three", 2, 2)
    first, again = (run_ranks(3, tmp_path, rank_processes.noisy_resume, url, "three", 2) for _ in range(2))
    assert [one["losses"] for one in first] == [one["losses"] for one in again]  # always the same seeds
    assert len({tuple(one["losses"]) for one in first}) == 3
    assert any("the number of ranks was 2 and is 3" in reason for reason in first[0]["drift"])
    assert any("rank 2 has no generators in the checkpoint" in reason for reason in first[2]["drift"])
    assert not any("no generators" in reason for reason in first[1]["drift"])


def test_what_is_saved_of_them_has_short_names() -> None:
    state = Determinism({"model": torch.nn.Linear(3, 3)}, 0, 1).state_dict()
    assert len(json.dumps(rng_state.names(state["generators"]))) < 100


# --- iterators ----------------------------------------------------------------------------------------------------


class Shuffled(DataLoader[Any]):
    """A loader of a user's own that can be resumed in the middle of an epoch: it keeps its seed and its position."""

    def __init__(self, workers: int) -> None:
        super().__init__(
            TensorDataset(torch.arange(24.0)), batch_size=4, shuffle=True, num_workers=workers, generator=None
        )
        self.order = torch.Generator()
        self.sampler.generator = self.order  # type: ignore[union-attr]
        self.at_start = self.order.get_state()
        self.given = 0
        self.skip = 0

    def __iter__(self) -> Any:
        self.order.set_state(self.at_start)
        skip, self.skip, self.given = self.skip, 0, 0
        batches = super().__iter__()
        for number, batch in enumerate(batches):
            self.given = number + 1
            if number >= skip:
                yield batch[0]
        self.at_start, self.given = self.order.get_state(), 0

    def state_dict(self) -> dict[str, Any]:
        return {"at_start": bytes(self.at_start.tolist()), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at_start = torch.tensor(list(state["at_start"]), dtype=torch.uint8)
        self.skip = state["given"]


def consume(loader: Shuffled, ckpt: Checkpointer, step: int, until: int, save_at: int | None = None) -> list[Any]:
    """Steps that depend on the data, and on the global generator."""
    seen = []
    while step < until:
        for batch in loader:
            step += 1
            seen.append((sorted(batch.tolist()), torch.rand(()).item()))
            ckpt.step(step)
            if step == save_at:
                ckpt.save(step).wait("remote", 20)
            if step == until:
                break
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("save_at", [2, 6, 7])  # in the middle of an epoch, at its end, in the next
def test_the_iterator_that_a_resumed_run_makes_again_leaves_the_generators_alone(
    url: str, workers: int, save_at: int
) -> None:
    run = f"iterator-{workers}-{save_at}"
    loader = Shuffled(workers)
    with Checkpointer({"loader": loader}, url, run=run, policy="100 steps") as ckpt:
        undisturbed = consume(loader, ckpt, 0, 14, save_at)
    rank_processes.seed_all(99)
    loader = Shuffled(workers)
    with Checkpointer({"loader": loader}, url, run=run, policy="100 steps") as ckpt:
        assert ckpt.restore() == save_at
        assert consume(loader, ckpt, save_at, 14) == undisturbed[save_at:]
        assert "_get_iterator" not in vars(loader)  # nothing is left of the hook


def read(loader: Any, ckpt: Checkpointer, step: int, until: int, save_at: int | None, after_epoch: bool) -> list[Any]:
    """As consume, with a draw between epochs; saved by the loop's body, or when an epoch is over."""
    seen = []
    while step < until:
        for (batch,) in loader:
            step += 1
            seen.append((batch.tolist(), torch.rand(()).item()))
            ckpt.step(step)
            if step == save_at and not after_epoch:
                ckpt.save(step).wait("remote", 20)
            if step == until:
                break
        if step == save_at and after_epoch:
            ckpt.save(step).wait("remote", 20)
        torch.rand(())
    return seen


# torchdata's workers look up every 5 seconds only, and whoever collects the garbage waits for them
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # what torchdata calls
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.chaos)])
@pytest.mark.parametrize(("save_at", "after_epoch"), [(2, False), (6, False), (6, True), (7, False)])
def test_torchdatas_loader_leaves_the_generators_alone(url: str, workers: int, save_at: int, after_epoch: bool) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    run, numbers = f"torchdata-{workers}-{save_at}-{after_epoch}", TensorDataset(torch.arange(24.0))
    loader = torchdata.StatefulDataLoader(numbers, batch_size=4, shuffle=True, num_workers=workers)
    with Checkpointer({"loader": loader}, url, run=run, policy="100 steps") as ckpt:
        undisturbed = read(loader, ckpt, 0, 14, save_at, after_epoch)
    rank_processes.seed_all(99)
    loader = torchdata.StatefulDataLoader(numbers, batch_size=4, shuffle=True, num_workers=workers)
    with Checkpointer({"loader": loader}, url, run=run, policy="100 steps") as ckpt:
        assert ckpt.restore() == save_at
        if after_epoch:
            torch.rand(())  # the draw between epochs came after the save
        assert read(loader, ckpt, save_at, 14, None, False) == undisturbed[save_at:]


def test_a_loader_that_is_used_later_is_not_taken_for_the_one_that_continues(url: str) -> None:
    loader, other = Shuffled(0), Shuffled(0)
    state = {"loader": loader, "other": other}

    def steps(ckpt: Checkpointer, step: int, until: int) -> list[Any]:
        seen: list[Any] = []
        for batch in loader:
            step += 1
            seen.append((batch.tolist(), torch.rand(()).item()))
            ckpt.step(step)
            if step == 2:
                ckpt.save(2).wait("remote", 20)
            if step == 4:
                seen += [batch.tolist() for batch in other]
            if step == until:
                break
        return seen

    with Checkpointer(state, url, run="later", policy="100 steps") as ckpt:
        undisturbed = steps(ckpt, 0, 6)
    rank_processes.seed_all(99)
    loader, other = Shuffled(0), Shuffled(0)
    with Checkpointer({"loader": loader, "other": other}, url, run="later", policy="100 steps") as ckpt:
        assert ckpt.restore() == 2
        assert steps(ckpt, 2, 6) == undisturbed[2:]


def test_for_a_loader_that_is_not_among_the_state_the_generators_are_set_again_by_hand(url: str) -> None:
    with Checkpointer({"step": 1}, url, run="by-hand") as ckpt:
        with pytest.raises(CheckpointError, match="no generators were restored"):
            ckpt.restore_generators()
        ckpt.save(1).wait("remote", 20)
        expected = torch.rand(3)
        ckpt.restore()
        iter(DataLoader(TensorDataset(torch.arange(4))))
        ckpt.restore_generators()
        assert torch.equal(torch.rand(3), expected)


# --- drift --------------------------------------------------------------------------------------------------------


def drift_after(url: str, run: str, state: dict[str, Any]) -> tuple[str, ...]:
    with Checkpointer(state, url, run=run) as ckpt:
        assert ckpt.restore() == 1
        return ckpt.status().drift


def test_what_a_checkpoint_depends_on_is_in_its_manifest_for_people_to_read(url: str) -> None:
    with Checkpointer({"model": torch.nn.Linear(2, 2), "step": 1}, url, run="facts") as ckpt:
        ckpt.save(1).wait("remote", 20)
    with closing(open_store(url)) as store:
        facts = store.manifest("facts", 1).facts
    assert facts["state"] == ["model", "step"]
    assert facts["generators"] == ["python", "numpy", "torch"]
    assert (facts["world_size"], facts["threads"]) == (1, torch.get_num_threads())
    assert facts["torch"] == torch.__version__
    assert facts["devices"][0].startswith("cpu ")
    json.dumps(dict(facts))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads was"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms was off and is on"),
        (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "was off and is warn"),
        (lambda: setattr(torch.backends.cudnn, "benchmark", True), "cudnn_benchmark was False and is True"),
        (lambda: setattr(torch.backends.cudnn, "deterministic", True), "cudnn_deterministic was False and is True"),
        (lambda: torch.set_default_dtype(torch.float64), "default_dtype was torch.float32 and is torch.float64"),
        (lambda: torch.set_float32_matmul_precision("high"), "matmul_precision was highest and is high"),
    ],
)
def test_another_setting_is_reported_once_with_its_consequence(
    url: str, caplog: pytest.LogCaptureFixture, change: Any, told: str
) -> None:
    with Checkpointer({"step": 1}, url, run="settings") as ckpt:
        ckpt.save(1).wait("remote", 20)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        change()
        with caplog.at_level(logging.WARNING, "deepvm.checkpoint"):
            drift = drift_after(url, "settings", {"step": 0})
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)
    (reason,) = drift
    assert told in reason
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_another_environment_is_reported(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer({"step": 1}, url, run="environment") as ckpt:
        ckpt.save(1).wait("remote", 20)
    monkeypatch.setenv("OMP_NUM_THREADS", "13")
    (reason,) = drift_after(url, "environment", {"step": 0})
    assert "OMP_NUM_THREADS was not set and is 13" in reason or "and is 13" in reason


@pytest.mark.parametrize(
    ("name", "value"),
    [("torch", "1.0"), ("python", "2.7"), ("numpy", "0.9"), ("devices", ["cpu AVX", "cuda A100"]), ("world_size", 9)],
)
def test_another_version_or_device_is_reported(name: str, value: Any) -> None:
    now = run_environment.take(1)
    assert run_environment.differences(now, now) == []
    (reason,) = run_environment.differences({**now, name: value}, now)
    assert (value[1] if isinstance(value, list) else str(value)) in reason


def test_what_is_saved_of_determinism_has_a_version(tmp_path: Path) -> None:
    with Checkpointer({"step": 1}, str(tmp_path), run="parts") as ckpt:
        ckpt.save(1).wait("remote", 20)
    with safe_open(tmp_path / "parts" / "step-000000000001.safetensors", "pt") as file:
        (skeleton,) = json.loads(file.metadata()["skeleton"])
    found = skeleton["deepvm.determinism"]
    assert found["version"] == 1


def test_every_difference_is_one_sentence_and_what_is_not_known_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"world_size": 2, "numpy": "2.0", "devices": ["cpu AVX2"], "omp_num_threads": None, "torch": "2.7"}
    saved = {
        "world_size": 3,
        "numpy": None,
        "devices": ["cpu AVX2", "cuda A100"],
        "omp_num_threads": "4",
        "python": "3",
    }
    assert run_environment.differences(saved, now) == [
        "the number of ranks was 3 and is 2: batches, sums over ranks and generators are not those of the saved run",
        "OMP_NUM_THREADS was 4 and is not set: other libraries add up in another order; start with OMP_NUM_THREADS=4",
        "devices was cpu AVX2, cuda A100 and is cpu AVX2: their kernels round in another way",
    ]
    assert run_environment.differences({"numpy": "1.0"}, {"numpy": None}) == []

    def mixed() -> str:
        raise RuntimeError("old and new flags were mixed")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    taken = run_environment.take(5, with_cuda=True)
    assert (taken["matmul_precision"], taken["world_size"]) == ("mixed", 5)
    assert taken["devices"] == [f"cpu {torch.backends.cpu.get_cpu_capability()}"]


def test_a_piece_that_nothing_takes_is_reported(url: str) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpointer({"model": model, "loader": Shuffled(0)}, url, run="piece") as ckpt:
        ckpt.save(1).wait("remote", 20)
    (reason,) = drift_after(url, "piece", {"model": model})
    assert "the state of loader (loader), which the Checkpointer does not have" in reason


def test_a_loader_whose_position_nobody_saves_is_reported(url: str) -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)))
    with Checkpointer({"step": 1}, url, run="outside") as ckpt:
        ckpt.save(1).wait("remote", 20)
    assert loader
    (reason,) = drift_after(url, "outside", {"step": 0})
    assert "a DataLoader was in use, whose position is not in the checkpoint" in reason


def test_a_checkpoint_without_generators_is_restored_and_it_is_reported(tmp_path: Path) -> None:
    with Checkpointer({"step": 1}, f"file://{tmp_path / 'new'}") as ckpt:
        ckpt.save(1).wait("remote", 20)
    new, old = open_store(f"file://{tmp_path / 'new'}"), open_store(f"file://{tmp_path / 'old'}")
    manifest = new.manifest("default", 1)
    data = bytearray(manifest.size_bytes)
    new.read_chunk(manifest, 0, memoryview(data))
    changed = bytes(data).replace(DETERMINISM.encode(), DETERMINISM.replace("m", "n").encode())
    digest = xxhash.xxh3_64_intdigest(changed)
    writer = old.writer("default", 1, size_bytes=len(changed), chunk_bytes=manifest.chunk_bytes)
    writer.put(0, [memoryview(changed)], digest)
    fields = {name: getattr(manifest, name) for name in ("run", "step", "size_bytes", "chunk_bytes", "created_s")}
    writer.publish(Manifest(**fields, digests=[digest]))
    (reason,) = drift_after(f"file://{tmp_path / 'old'}", "default", {"step": 0})
    assert "has no random generators" in reason


def test_names_of_our_own_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="are reserved"):
        Checkpointer({"deepvm.determinism": 1}, url)
