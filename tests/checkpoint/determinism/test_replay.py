"""A step replayed after a restore proves that the run goes on as it would have, or names what is not the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from deepvm.checkpoint import Checkpointer, resumable
from deepvm.checkpoint.determinism.replay import write_witness
from deepvm.checkpoint.restore.newest import restore_newest
from deepvm.cli.app import make_app
from deepvm.errors import CheckpointError, StoreError, UsageError
from deepvm.memnode import Limits, MemoryNode
from deepvm.policy import EverySteps, Retention
from deepvm.store.files.store import FileStore
from deepvm.store.urls import open_store
from tests.support.checkpoint import rank_processes
from tests.support.checkpoint.rank_processes import run_ranks
from tests.support.waiting import wait_until

MIB = 2**20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=128 * MIB, block_bytes=MIB, limits=Limits(stop_s=0.0)) as node:
        yield f"memory://{node.address}"


@pytest.fixture(autouse=True)
def seeded() -> None:
    rank_processes.seed_all(7)


class Hiding(rank_processes.Noisy):
    """Training with a piece of state that nobody saves, if it is told to use it."""

    def __init__(self, hidden: float = 0.0) -> None:
        super().__init__()
        self.hidden = hidden
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state["schedule"] = self.schedule

    def step(self) -> None:
        super().step()
        self.schedule.step()


def train(work: Hiding, url: Any, run: str, steps: int, every: int = 2, **options: Any) -> None:
    policy = EverySteps(every)
    with Checkpointer(work.state, url, run=run, policy=policy, on_busy="wait", replay=work.step, **options) as ckpt:
        for step in range(1, steps + 1):
            work.step()
            ckpt.step(step)
        assert ckpt.status().failed == 0


def test_a_step_that_is_the_same_is_proven_and_training_continues_before_it(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = Hiding()
    train(undisturbed, url, "proven", 7)
    rank_processes.seed_all(99)
    resumed = Hiding()
    with Checkpointer(resumed.state, url, run="proven", replay=resumed.step) as ckpt:
        with caplog.at_level(logging.INFO, "deepvm.checkpoint"):
            assert ckpt.restore(verify="replay") == 6
        assert "replayed and identical" in caplog.text
        resumed.losses.clear()
        resumed.step()
    assert resumed.losses == undisturbed.losses[6:]
    assert resumed.digest() == undisturbed.digest()


def test_a_step_that_is_not_the_same_is_disproven_by_name_and_the_state_put_back(url: str) -> None:
    train(Hiding(), url, "hidden", 3)
    rank_processes.seed_all(99)
    resumed = Hiding()
    with Checkpointer(resumed.state, url, run="hidden", replay=resumed.step) as ckpt:
        assert ckpt.restore() == 2
        truth = resumed.digest()
        resumed.hidden = 1e-3
        with pytest.raises(CheckpointError, match=r"step 3, replayed from step 2, .*model\.0\.bias.* differ"):
            ckpt.restore(verify="replay")
        assert resumed.digest() == truth
        resumed.hidden = 0.0
        assert ckpt.restore(verify="replay") == 2


@pytest.mark.parametrize("draw", ["random.random()", "np.random.rand()", "torch.rand(1)"])
def test_one_draw_too_many_is_disproven(url: str, draw: str) -> None:
    train(Hiding(), url, "draw", 3)
    resumed = Hiding()

    def step() -> None:
        resumed.step()
        eval(draw, vars(rank_processes))  # noqa: S307 - one of the three above

    with (
        Checkpointer(resumed.state, url, run="draw", replay=step) as ckpt,
        pytest.raises(CheckpointError, match=r"computed: generator (python|numpy|torch) differ"),
    ):
        ckpt.restore(verify="replay")


def test_a_plain_value_that_differs_is_named(url: str) -> None:
    train(Hiding(), url, "plain", 3)
    resumed = Hiding()

    def step() -> None:
        resumed.step()
        resumed.schedule.step()

    with (
        Checkpointer(resumed.state, url, run="plain", replay=step) as ckpt,
        pytest.raises(CheckpointError, match=r"optimizer: param_groups, schedule: .*last_epoch"),
    ):
        ckpt.restore(verify="replay")


def test_without_a_witness_it_says_so(url: str) -> None:
    work = Hiding()
    with Checkpointer(work.state, url, run="lonely", replay=work.step) as ckpt:
        work.step()
        ckpt.save(1).wait("remote", 20)  # and no step after it
        with pytest.raises(CheckpointError, match="step 1 cannot be replayed: it has no witness"):
            ckpt.restore(verify="replay")
        assert ckpt.restore() == 1
        with pytest.raises(UsageError, match="verify is"):
            ckpt.restore(verify="prayer")
    with Checkpointer(work.state, url, run="lonely") as ckpt, pytest.raises(UsageError, match="step_function"):
        ckpt.restore(verify="replay")


def test_steps_without_a_call_have_no_witness(url: str, caplog: pytest.LogCaptureFixture) -> None:
    work = Hiding()
    with Checkpointer(work.state, url, run="untold", replay=work.step, on_busy="wait") as ckpt:
        for step in (1, 3):
            work.step()
            ckpt.save(step)
        assert "step 1 has no witness: ckpt.step(2) was not called" in caplog.text


def test_a_step_function_that_fails_leaves_the_restored_state(url: str) -> None:
    train(Hiding(), url, "fails", 3)
    resumed = Hiding()

    def step() -> None:
        resumed.step()
        raise RuntimeError("out of luck")

    with Checkpointer(resumed.state, url, run="fails", replay=step) as ckpt:
        ckpt.restore()
        truth = resumed.digest()
        with pytest.raises(CheckpointError, match="failed: RuntimeError: out of luck"):
            ckpt.restore(verify="replay")
        assert resumed.digest() == truth


def test_a_step_function_may_tell_its_step(url: str) -> None:
    train(Hiding(), url, "telling", 3)
    resumed = Hiding()
    told = []

    def step() -> None:
        resumed.step()
        told.append((ckpt.step(3), ckpt.save(3).state))

    with Checkpointer(resumed.state, url, run="telling", policy=EverySteps(1), replay=step) as ckpt:
        assert ckpt.restore(verify="replay") == 2
        assert told == [(None, "skipped")]
        assert ckpt.status().taken == 0


def test_witnesses_go_with_their_checkpoints_in_every_store(url: str, tmp_path: Path) -> None:
    stores, work = [url, f"file://{tmp_path}"], Hiding()
    with Checkpointer(work.state, stores, run="kept", replay=work.step, retention=Retention(keep_last=2)) as ckpt:
        for step in range(1, 9):
            work.step()
            if step % 2:
                ckpt.step(step)
            else:
                ckpt.save(step).wait("durable", 20)
                wait_until(lambda seen=step - 2: seen == 0 or ckpt.status().last_witness_step == seen, what="a witness")
    with closing(open_store(url)) as memory:
        assert memory.steps("kept") == [6, 8]
        assert memory.steps("kept.witness") in ([6], [4, 6])  # nobody saw step 9; the next one takes 4 away
    durable = open_store(stores[1])
    assert durable.steps("kept") == [6, 8]
    assert durable.steps("kept.witness") == [6]
    resumed = Hiding()
    with Checkpointer(resumed.state, stores[1], run="kept", replay=resumed.step) as ckpt:
        assert ckpt.restore(6, verify="replay") == 6


def test_a_damaged_witness_is_reported(tmp_path: Path) -> None:
    train(Hiding(), f"file://{tmp_path}", "damaged", 3)
    (file,) = (tmp_path / "damaged.witness").glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"deepvm-witness/1", b"deepvm-witness/2"))
    work = Hiding()
    with (
        Checkpointer(work.state, f"file://{tmp_path}", run="damaged", replay=work.step) as ckpt,
        pytest.raises(CheckpointError, match=r"witness of step 2 .* cannot be read"),
    ):
        ckpt.restore(verify="replay")


def test_ranks_replay_together(tmp_path: Path, url: str) -> None:
    run_ranks(2, tmp_path, rank_processes.witnessed, url)
    for told in run_ranks(2, tmp_path, rank_processes.replayed, url, -1):
        assert told["problem"] is None
    first, second = run_ranks(2, tmp_path, rank_processes.replayed, url, 1)  # rank 1 draws once too often
    assert first["problem"] == f"rank 1: {second['problem']}"
    assert "generator torch differ" in second["problem"]
    (alone,) = run_ranks(1, tmp_path, rank_processes.replayed, url, -1)
    assert "it was saved by 2 ranks: replay it with 2 ranks, not 1" in alone["problem"]


class Reading(Hiding):
    """Training on a loader that can be resumed."""

    def __init__(self) -> None:
        super().__init__()
        features = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
        self.loader = resumable(DataLoader(TensorDataset(features), 4, shuffle=True), seed=2)
        self.state["loader"] = self.loader

    def train_on(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def one_step(self) -> None:
        for _ in range(2):  # an epoch may be over
            for (batch,) in self.loader:
                self.train_on(batch)
                return


def test_a_step_with_data_is_proven_in_the_middle_of_an_epoch_and_at_its_end(tmp_path: Path) -> None:
    work, url, step = Reading(), f"file://{tmp_path}", 0
    options: dict[str, Any] = {"policy": EverySteps(1), "on_busy": "wait", "retention": Retention(keep_last=9)}
    with Checkpointer(work.state, url, replay=work.one_step, **options) as ckpt:
        for _ in range(3):
            for (batch,) in work.loader:
                work.train_on(batch)
                step += 1
                ckpt.step(step)
    assert open_store(url).steps("default.witness") == [1, 2, 3, 4, 5, 6, 7, 8]
    resumed = Reading()
    with Checkpointer(resumed.state, url, replay=resumed.one_step) as ckpt:
        for step in range(1, 9):
            assert ckpt.restore(step, verify="replay") == step


SCRIPT = """
from tests.checkpoint.determinism.test_replay import Hiding

def build():
    print("this is not JSON")
    work = Hiding({hidden})
    return work.state, work.step

def nothing():
    return None
"""


def test_the_command_line_proves_and_disproves_offline(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    train(Hiding(), store, "offline", 3)
    for name, hidden in (("good", 0.0), ("bad", 1e-3)):
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(hidden=hidden))

    def verify(spec: str, *more: str) -> Any:
        return CliRunner().invoke(
            make_app(["checkpoint"]), ["checkpoint", "verify", store, "--replay", f"{tmp_path / spec}", *more]
        )

    good = verify("good.py:build", "--json")
    assert good.exit_code == 0, good.output
    (document,) = json.loads(good.stdout)["checkpoints"]
    assert (document["run"], document["step"], document["replayed"]) == ("offline", 2, True)
    both = CliRunner().invoke(
        make_app(["checkpoint"]), ["checkpoint", "verify", store, "--all", "--json"]
    )  # witnesses are checkpoints, too
    assert [row["run"] for row in json.loads(both.stdout)["checkpoints"]] == ["offline", "offline.witness"]
    assert json.loads(both.stdout)["good"]
    shown = verify("good.py:build")
    assert "replayed and identical" in shown.stdout
    bad = verify("bad.py:build")
    assert bad.exit_code == 1
    assert "model.0.weight" in bad.stdout
    assert "checkpoint rm" not in bad.stdout  # the bytes are good
    for spec in ("good.py", "good.py:missing", "none.py:build", "good.py:nothing"):
        assert verify(spec).exit_code == 2 or isinstance(verify(spec).exception, UsageError)


def test_a_witness_that_cannot_be_published_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "w" / "step-000000000003.json").mkdir(parents=True)
    with closing(FileStore(tmp_path)) as store:
        with pytest.raises(StoreError):
            write_witness(store, "w", 3, bytes(100), 64)
        assert [path.name for path in (tmp_path / "w").iterdir() if "tmp" in path.name] == []
        write_witness(store, "w", 4, bytes(100), 64)
        assert store.manifest("w", 4).size_bytes == 100


def test_a_step_that_no_store_has_is_named(tmp_path: Path) -> None:
    with closing(FileStore(tmp_path)) as store:
        assert restore_newest([store], "r", {"n": 1}) is None
        with pytest.raises(CheckpointError, match="step 5 of run r"):
            restore_newest([store], "r", {"n": 1}, step=5)
