"""A machine's fetcher: a real process, a real memory node, and nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.fetch.segment import PATH_VARIABLE
from deepvm.fetch.segment_files import remove
from deepvm.fetch.segment_reader import SegmentReader, find_segment
from deepvm.memnode import MemoryNode
from deepvm.runtime.agent.prefetch import Prefetcher, segment_of, store_urls
from tests.support.waiting import wait_until

RUN, TOKEN = "fetched-run", "what-all-of-them-know"
PATIENCE_S = 20.0


@pytest.fixture
def node(start_node: Callable[..., MemoryNode]) -> MemoryNode:
    return start_node(limits={"flush_s": 1.0}, token=TOKEN)


@pytest.fixture
def fetching(tmp_path: Path) -> Iterator[Prefetcher]:
    found = Prefetcher(tmp_path, RUN, token=TOKEN, durable=None)
    yield found
    found.close()
    assert not found.path.exists()


def saved(node: MemoryNode, *steps: int) -> None:
    state = {"ramp": torch.arange(1000.0)}
    with Checkpointer(state, f"memory://{node.address}", run=RUN, token=TOKEN, on_error="raise") as ckpt:
        for step in steps:
            ckpt.save(step).wait("remote", PATIENCE_S)


def step_in(fetching: Prefetcher, monkeypatch: pytest.MonkeyPatch) -> int:
    """What was fetched, once it is there."""
    monkeypatch.setenv(PATH_VARIABLE, str(fetching.path))
    found: list[SegmentReader] = []

    def look() -> bool:
        there = find_segment(RUN)
        found.extend([] if there is None else [there])
        return bool(found)

    wait_until(look, "a segment", timeout_s=PATIENCE_S)
    step = found[0].about.manifest.step
    found[0].close()
    return step


def test_it_brings_what_is_newest_each_time_it_begins(
    node: MemoryNode, fetching: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(node, 1)
    fetching.begin([node.address])
    assert step_in(fetching, monkeypatch) == 1
    saved(node, 2)
    fetching.begin([node.address])
    assert step_in(fetching, monkeypatch) == 2


def test_without_a_checkpoint_or_node_nothing_is_there(node: MemoryNode, fetching: Prefetcher, tmp_path: Path) -> None:
    fetching.begin([])
    assert not (tmp_path / "fetch.txt").exists(), "there is nothing to ask"
    fetching.begin([node.address])
    wait_until(lambda: "nothing to fetch" in (tmp_path / "fetch.txt").read_text(), "an answer", timeout_s=PATIENCE_S)
    node.stop(now=True)
    fetching.begin([node.address])
    wait_until(lambda: "cannot be reached" in (tmp_path / "fetch.txt").read_text(), "a refusal", timeout_s=PATIENCE_S)


def test_one_that_cannot_be_started_costs_nothing_but_time(
    node: MemoryNode, fetching: Prefetcher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fetch.txt").mkdir()  # where its log should be
    fetching.begin([node.address])
    assert "no checkpoint is prefetched" in caplog.text


def test_after_the_end_none_begins(node: MemoryNode, fetching: Prefetcher) -> None:
    fetching.close()
    fetching.begin([node.address])
    assert fetching._fetcher is None


def test_what_a_killed_fetcher_left_is_removed(
    node: MemoryNode, fetching: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(node, 1)
    fetching.begin([node.address])
    step_in(fetching, monkeypatch)
    assert fetching._fetcher is not None
    os.kill(fetching._fetcher.pid, signal.SIGKILL)
    fetching._fetcher.wait(PATIENCE_S)
    assert fetching.path.exists()
    remove(fetching.path)
    remove(fetching.path)  # and where there is nothing, nothing happens
    assert not fetching.path.exists()


def test_machines_and_runs_do_not_share_a_segment(tmp_path: Path) -> None:
    folders = [tmp_path / run / machine for run in "ab" for machine in ("worker-0", "worker-1")]
    assert len({segment_of(folder) for folder in folders}) == len(folders)


def test_the_nearest_store_comes_first() -> None:
    assert store_urls(["h1:1", "h2:2"], "s3://bucket") == ["memory://h1:1,h2:2", "s3://bucket"]
    assert store_urls([], "s3://bucket") == ["s3://bucket"]
