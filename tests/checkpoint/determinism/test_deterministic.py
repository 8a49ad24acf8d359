"""One call makes a run repeatable, and says what it could not."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from deepvm.checkpoint import deterministic
from deepvm.checkpoint.determinism import seeding
from deepvm.checkpoint.determinism.seeding import CUBLAS, _check_hash_seed, _environment_at_start
from deepvm.errors import UsageError


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CUBLAS, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    if hasattr(torch.backends.mkldnn, "deterministic"):
        torch.backends.mkldnn.deterministic = False
    torch.set_num_threads(threads)


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def test_the_same_seed_gives_the_same_numbers_and_another_others() -> None:
    deterministic(3)
    first = draws()
    deterministic(3)
    assert draws() == first
    deterministic(4)
    assert not set(draws()) & set(first)


def test_flags_threads_and_the_environment_are_set_and_listed() -> None:
    made = deterministic(1, threads=1)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert torch.get_num_threads() == made.threads == 1
    assert os.environ[CUBLAS] == ":4096:8"
    text = str(made)
    assert text.startswith("seed 1\n")
    assert "generators: Python, torch" in text
    assert f"{CUBLAS}=:4096:8" in text
    assert all(row in text for row in (*made.done, *made.not_done))


HASHES = (
    "PYTHONHASHSEED: Python reads it when it starts; without it the order of sets of strings differs between "
    "processes. Start with PYTHONHASHSEED=0"
)


@pytest.mark.parametrize("ready", [True, False])
def test_the_whole_report_of_a_process_that_is_ready_and_of_one_that_is_not(
    ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "_environment_at_start", lambda: {"PYTHONHASHSEED": "0"} if ready else {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1" if ready else "7")
    monkeypatch.setattr(seeding, "cuda_in_use", lambda: not ready)
    if not ready:
        monkeypatch.delitem(sys.modules, "numpy")
    found = str(deterministic(9, threads=1 if ready else 2)).splitlines()
    kernels = [
        "  set      torch.use_deterministic_algorithms: operations that cannot repeat themselves raise an error",
        "  set      cuDNN: deterministic, no benchmark",
        *(["  set      oneDNN: deterministic"] * hasattr(torch.backends.mkldnn, "deterministic")),
    ]
    if ready:
        assert found == [
            "seed 9",
            "  set      generators: Python, torch, NumPy",
            *kernels,
            "  set      CUBLAS_WORKSPACE_CONFIG=:4096:8",
            "  set      1 thread: a resumed run needs as many",
            "  set      PYTHONHASHSEED=0, since Python was started",
        ]
    else:
        assert CUBLAS not in os.environ
        assert found == [
            "seed 9",
            "  set      generators: Python, torch",
            *kernels,
            "  set      2 threads: a resumed run needs as many",
            "  NOT set  NumPy's generator: numpy is not imported yet; numpy.random.seed(seed) when it is",
            "  NOT set  CUBLAS_WORKSPACE_CONFIG: CUDA was used before; call deterministic() first, or start with it",
            "  NOT set  OMP_NUM_THREADS is 7: libraries beside torch may use another number; start with "
            "OMP_NUM_THREADS=2",
            f"  NOT set  {HASHES}",
        ]


def test_generators_of_a_loader_follow_the_seed_and_their_number() -> None:
    made = deterministic(9)
    assert [made.generator(number).initial_seed() for number in range(3)] == [9, 10, 11]
    assert made.generator().initial_seed() == 9


def test_an_operation_that_cannot_repeat_itself_raises() -> None:
    deterministic(1)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.nn.MaxUnpool1d(2)(torch.ones(1, 1, 2), torch.tensor([[[0, 2]]]))


def test_a_workspace_that_does_not_repeat_is_left_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":0:0")
    made = deterministic(1)
    assert os.environ[CUBLAS] == ":0:0"
    assert any(CUBLAS in row for row in made.not_done)


def test_hashes_are_fixed_by_whoever_starts_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "5")  # too late: Python has read it
    if _environment_at_start().get("PYTHONHASHSEED") is None:
        assert any("PYTHONHASHSEED" in row for row in deterministic(1).not_done)
    for value, fixed in (("0", True), ("7", True), ("random", False), ("", False)):
        done: list[str] = []
        not_done: list[str] = []
        _check_hash_seed({"PYTHONHASHSEED": value}, done, not_done)
        assert (bool(done), bool(not_done)) == (fixed, not fixed)


def test_seeds_and_threads_that_make_no_sense_are_refused() -> None:
    for seed in (-1, 2**32, 1.5, "7"):
        with pytest.raises(UsageError, match="a seed is a whole number"):
            deterministic(seed)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="0 threads"):
        deterministic(1, threads=0)


class Chance(torch.utils.data.Dataset[list[float]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[float]:
        assert torch.are_deterministic_algorithms_enabled()
        return [float(index), *draws()]


def test_a_loaders_workers_repeat_themselves_too() -> None:
    def epoch() -> list[list[float]]:
        made = deterministic(5)
        loader = DataLoader(
            Chance(), shuffle=True, num_workers=2, generator=made.generator(), worker_init_fn=made.worker_init,
            collate_fn=list, multiprocessing_context="fork",
        )  # fmt: skip
        return [sample for batch in loader for sample in batch]

    assert epoch() == epoch()


@pytest.mark.parametrize(("old", "new"), [("Determined", "DeterminismReport"), ("settled", "with_final_buckets")])
def test_names_of_earlier_versions_still_work_and_warn(old: str, new: str) -> None:
    from deepvm import checkpoint

    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}"):
        assert getattr(checkpoint, old) is getattr(checkpoint, new)


def test_where_the_environment_at_the_start_cannot_be_read_the_present_one_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeding, "Path", lambda name: Path("/nowhere") / name.lstrip("/"))
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert "PYTHONHASHSEED=5, since Python was started" in deterministic(1).done
