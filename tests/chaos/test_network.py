"""Links that are cut, healed and slow, between a trainer and its memory nodes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.handle import SaveHandle
from tests.support.checkpoint.processes import Work, digest_of
from tests.support.far_node import TOKEN, far_nodes

pytestmark = pytest.mark.chaos


def settled(work: Work, handle: SaveHandle, within_s: float) -> float:
    """Train until the save is over; how long that took."""
    began = time.monotonic()
    while handle.state in ("taken", "staged"):
        work.step()
        assert time.monotonic() - began < within_s, handle
    return time.monotonic() - began


def restored(url: str) -> tuple[int | None, str]:
    fresh = Work()
    with Checkpointer(fresh.state, url, token=TOKEN) as ckpt:
        return ckpt.restore(), digest_of(fresh.model, fresh.optimizer, "")


def saved(work: Work, ckpt: Checkpointer, step: int) -> str:
    digest = digest_of(work.model, work.optimizer, "")
    ckpt.save(step).wait("remote", 40)
    return digest


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.7])
def test_a_save_outlives_a_cut_of_two_seconds_or_fails_cleanly(tmp_path: Path, after_s: float) -> None:
    with far_nodes(tmp_path) as (node,):
        work = Work()
        work.step()
        with Checkpointer(work.state, f"{node.url}?pace=12000000", token=TOKEN, deadline_s=20) as ckpt:
            before = saved(work, ckpt, 1)
            work.step()
            during = digest_of(work.model, work.optimizer, "")
            handle = ckpt.save(2)
            time.sleep(after_s)
            node.cut()
            threading.Timer(2.0, node.heal).start()
            settled(work, handle, 30)
            time.sleep(2.0)
            assert restored(node.url) == ((2, during) if handle.state == "remote" else (1, before))
            after = saved(work, ckpt, 3)
        assert restored(node.url) == (3, after)


def test_a_cut_for_good_fails_the_save_within_its_deadline_and_training_goes_on(tmp_path: Path) -> None:
    with far_nodes(tmp_path) as (node,):
        work = Work()
        work.step()
        with Checkpointer(work.state, f"{node.url}?pace=12000000", token=TOKEN, deadline_s=4) as ckpt:
            before = saved(work, ckpt, 1)
            work.step()
            handle = ckpt.save(2)
            time.sleep(0.3)
            node.cut()
            assert settled(work, handle, 12) < 8
            assert handle.state == "failed"
            assert node.address in str(ckpt.status().last_error)
            handle = ckpt.save(3)
            assert settled(work, handle, 30) < 24  # the deadline, and a try to connect
            assert ckpt.status().failed == 2
            node.heal()
            time.sleep(1)
            assert restored(node.url) == (1, before)
            after = saved(work, ckpt, 4)
            assert restored(node.url) == (4, after)


def test_a_replica_behind_a_cut_costs_time_and_nothing_else(tmp_path: Path) -> None:
    with far_nodes(tmp_path, 2) as (near, far):
        url = f"memory://{near.address},{far.address}?replicas=2"
        work = Work()
        work.step()
        with Checkpointer(work.state, url, token=TOKEN, deadline_s=60) as ckpt:
            saved(work, ckpt, 1)
            work.step()
            far.cut()
            truth = digest_of(work.model, work.optimizer, "")
            handle = ckpt.save(2)
            settled(work, handle, 60)
            assert handle.state == "remote"
            assert ckpt.status().nodes_down == (far.address,)
            assert restored(url) == (2, truth)
            far.heal()
            deadline = time.monotonic() + 30
            while ckpt.status().nodes_down and time.monotonic() < deadline:
                time.sleep(0.1)
            assert ckpt.status().nodes_down == ()
            near.cut()
            assert restored(url) == (2, truth)  # from the copy that was made again


def test_a_slow_link_means_skipped_saves_and_no_queue(tmp_path: Path) -> None:
    with far_nodes(tmp_path) as (node,):
        node.slow_down("60mbit")
        work = Work()
        work.step()
        with Checkpointer(work.state, node.url, token=TOKEN, deadline_s=60) as ckpt:
            truths, handles, threads = {}, [], 0
            ends = time.monotonic() + 12
            step = 0
            while time.monotonic() < ends:
                step += 1
                truths[step] = digest_of(work.model, work.optimizer, "")
                handles.append(ckpt.save(step))
                assert ckpt._saver._jobs.qsize() <= 1
                work.step()
                if step == 5:
                    threads = threading.active_count()
            assert threading.active_count() <= threads
            status = ckpt.status()
            assert status.skipped > 0
            assert status.skipped + status.taken == step
            settled(work, next(h for h in reversed(handles) if h.state != "skipped"), 30)
            last = ckpt.status().last_remote_step
        assert last is not None
        assert restored(node.url) == (last, truths[last])
