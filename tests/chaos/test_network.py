"""Links that are cut, healed and slow, between a trainer and its memory nodes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.handle import SaveHandle
from tests.support.checkpoint.processes import Work, digest_of
from tests.support.far_node import TOKEN, far_nodes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos


def train_until_settled(work: Work, handle: SaveHandle, within_s: float) -> None:
    def over() -> bool:
        work.step()
        return handle.state not in ("taken", "staged")

    wait_until(over, f"the end of {handle}", timeout_s=within_s)


def restored(url: str) -> tuple[int | None, str]:
    fresh = Work()
    with Checkpointer(fresh.state, url, token=TOKEN) as ckpt:
        return ckpt.restore(), digest_of(fresh.model, fresh.optimizer, "")


def saved(work: Work, ckpt: Checkpointer, step: int) -> str:
    digest = digest_of(work.model, work.optimizer, "")
    ckpt.save(step).wait("remote", 40)
    return digest


@pytest.mark.parametrize("after_bytes", [600_000, 3_600_000, 8_400_000])
def test_a_save_outlives_a_cut_of_two_seconds_or_fails_cleanly(tmp_path: Path, after_bytes: int) -> None:
    with far_nodes(tmp_path) as (node,):
        work = Work()
        work.step()
        with Checkpointer(work.state, f"{node.url}?pace=12000000", token=TOKEN, deadline_s=20) as ckpt:
            before = saved(work, ckpt, 1)
            work.step()
            during = digest_of(work.model, work.optimizer, "")
            handle = ckpt.save(2)
            node.await_bytes(after_bytes)
            node.cut()
            healed = threading.Timer(2.0, node.heal)
            healed.start()
            train_until_settled(work, handle, 30)
            healed.join()
            assert restored(node.url) == ((2, during) if handle.state == "remote" else (1, before))
            after = saved(work, ckpt, 3)
        assert restored(node.url) == (3, after)


def test_a_cut_for_good_fails_the_save_within_its_deadline_and_training_continues(tmp_path: Path) -> None:
    with far_nodes(tmp_path) as (node,):
        work = Work()
        work.step()
        with Checkpointer(work.state, f"{node.url}?pace=12000000", token=TOKEN, deadline_s=4) as ckpt:
            before = saved(work, ckpt, 1)
            work.step()
            handle = ckpt.save(2)
            node.await_bytes(3_000_000)
            node.cut()
            train_until_settled(work, handle, 8)
            assert handle.state == "failed"
            assert node.address in str(ckpt.status().last_error)
            handle = ckpt.save(3)
            train_until_settled(work, handle, 24)  # the deadline, and a try to connect
            assert ckpt.status().failed == 2
            node.heal()
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
            train_until_settled(work, handle, 60)
            assert handle.state == "remote"
            assert ckpt.status().nodes_down == (far.address,)
            assert restored(url) == (2, truth)
            far.heal()
            wait_until(lambda: ckpt.status().nodes_down == (), "the repair", timeout_s=30)
            near.cut()
            assert restored(url) == (2, truth)  # from the copy that was made again


def test_a_slow_link_means_skipped_saves_and_no_queue(tmp_path: Path) -> None:
    with far_nodes(tmp_path) as (node,):
        node.slow_down("60mbit")
        work = Work()
        work.step()
        with Checkpointer(work.state, node.url, token=TOKEN, deadline_s=60) as ckpt:
            truths, handles, threads = {}, [], 0
            step = 0
            while step < 20 or ckpt.status().remote < 3:
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
            train_until_settled(work, next(h for h in reversed(handles) if h.state != "skipped"), 30)
            last = ckpt.status().last_remote_step
        assert last is not None
        assert restored(node.url) == (last, truths[last])
