"""Ranks that restore together what was fetched to the machines of some of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepvm.checkpoint import Checkpointer
from deepvm.fetch import segment, segment_files
from tests.support.checkpoint.processes import Work, digest_of, nodes, url_of
from tests.support.checkpoint.rank_processes import run_ranks

PATIENCE_S = 30


def restore_fetched(rank: int, url: str, run: str, ranks_with_it: tuple[int, ...], local_ranks: int) -> dict[str, Any]:
    os.environ.update({"LOCAL_WORLD_SIZE": str(local_ranks), "LOCAL_RANK": str(rank % local_ranks)})
    if rank not in ranks_with_it:
        os.environ[segment.PATH_VARIABLE] = ""  # as if on another machine
    work = Work(200)
    with Checkpointer(work.state, url, run=run) as ckpt:
        step = ckpt.restore()
        fetched = any(stage.name == "fetch" for stage in ckpt.timeline().stages)
        return {"step": step, "digest": digest_of(work.model, work.optimizer, ""), "fetched": fetched}


@pytest.mark.parametrize(("ranks_with_it", "local_ranks"), [((0, 1), 2), ((0,), 1), ((1,), 1)])
def test_ranks_restore_the_same_from_a_segment_or_without_one(
    tmp_path: Path, ranks_with_it: tuple[int, ...], local_ranks: int
) -> None:
    run = f"ranks-{os.getpid()}-{len(ranks_with_it)}-{ranks_with_it[0]}"
    with nodes(1) as started:
        url = url_of(started)
        work = Work(200)
        work.step()
        truth = digest_of(work.model, work.optimizer, "")
        with Checkpointer(work.state, url, run=run) as ckpt:
            ckpt.save(4).wait("remote", PATIENCE_S)
        fetcher = subprocess.Popen(
            [sys.executable, "-m", "deepvm.fetch", "--run", run, "--json", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert fetcher.stdout is not None
            assert b'"step": 4' in fetcher.stdout.readline()
            told = run_ranks(2, tmp_path, restore_fetched, url, run, ranks_with_it, local_ranks)
            assert fetcher.wait(PATIENCE_S) == 0  # the last of its readers removed it
        finally:
            fetcher.kill()
            fetcher.communicate()
            segment_files.default_path(run).unlink(missing_ok=True)
    assert [one["step"] for one in told] == [4, 4]
    assert [one["digest"] for one in told] == [truth, truth]
    assert [one["fetched"] for one in told] == [rank in ranks_with_it for rank in (0, 1)]
