"""One script everywhere: what it does not say, the environment does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepvm
from deepvm.checkpoint import Checkpointer
from deepvm.errors import UsageError
from deepvm.memnode import MemoryNode
from deepvm.policy import EverySeconds, EverySteps

VARIABLES = ("DEEPVM_STORE", "DEEPVM_RUN", "DEEPVM_POLICY")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def state() -> dict[str, object]:
    return {"model": torch.nn.Linear(4, 4)}


def test_store_run_and_policy_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPVM_STORE", f"file://{tmp_path}")
    monkeypatch.setenv("DEEPVM_RUN", "tuesday")
    monkeypatch.setenv("DEEPVM_POLICY", "every 3 steps")
    with deepvm.Checkpointer(state()) as ckpt:
        saved = [step for step in range(1, 8) if (handle := ckpt.step(step)) and handle.wait() is None]
    assert saved == [3, 6]
    with Checkpointer(state(), str(tmp_path), run="tuesday") as ckpt:
        assert ckpt.restore() == 7  # the last step, which close() saves


def test_several_stores_are_a_tier_in_the_order_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=2**26, block_bytes=2**18) as node:
        monkeypatch.setenv("DEEPVM_STORE", f"memory://{node.address}  file://{tmp_path}")
        with Checkpointer(state()) as ckpt:
            ckpt.save(5).wait("durable", 20)
    with Checkpointer(state(), str(tmp_path)) as ckpt:
        assert ckpt.restore() == 5


def test_what_is_given_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPVM_STORE", "memory://127.0.0.1:1")
    monkeypatch.setenv("DEEPVM_RUN", "another")
    monkeypatch.setenv("DEEPVM_POLICY", "every 1 steps")
    with Checkpointer(state(), str(tmp_path), run="mine", policy="every 2 steps") as ckpt:
        assert (ckpt.run, ckpt.policy) == ("mine", EverySteps(2))
        ckpt.save(1).wait("remote", 20)


def test_without_an_environment_the_run_is_default_and_saved_every_minute(tmp_path: Path) -> None:
    with Checkpointer(state(), str(tmp_path)) as ckpt:
        assert (ckpt.run, ckpt.policy) == ("default", EverySeconds(60.0))


@pytest.mark.parametrize("empty", [None, "", " "])
def test_no_store_anywhere_is_reported_with_the_variables_name(
    monkeypatch: pytest.MonkeyPatch, empty: str | None
) -> None:
    if empty is not None:
        monkeypatch.setenv("DEEPVM_STORE", empty)
    with pytest.raises(UsageError, match="set DEEPVM_STORE"):
        Checkpointer(state())


def test_a_policy_that_nobody_understands_is_reported_with_the_variables_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPVM_POLICY", "now and then")
    with pytest.raises(UsageError, match=r"DEEPVM_POLICY.*now"):
        Checkpointer(state(), str(tmp_path))


def test_a_space_in_a_path_is_not_taken_for_two_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPVM_STORE", f"file://{tmp_path}/my runs")
    with pytest.raises(UsageError, match="DEEPVM_STORE has 'runs', which is not a URL: spaces separate stores"):
        Checkpointer(state())
    monkeypatch.setenv("DEEPVM_STORE", f"file://{tmp_path}/my%20runs")
    with Checkpointer(state()) as ckpt:
        ckpt.save(1).wait("durable", 20)
    assert (tmp_path / "my runs").is_dir()


@pytest.mark.parametrize("name", ["checkpoint.deterministic", "checkpoint.dcp.DeepvmWriter", "policy.EverySteps"])
def test_packages_are_attributes_without_an_import_of_their_own(name: str) -> None:
    code = f"import deepvm; print(deepvm.{name})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
