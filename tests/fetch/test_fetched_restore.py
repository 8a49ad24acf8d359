"""A trainer that restores what a fetcher brings, brought, or failed to bring."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.restore import prefetched
from deepvm.errors import StoreError
from deepvm.fetch import segment, segment_reader
from deepvm.fetch.fetched_store import FetchedStore, fetched_before
from deepvm.memnode import MemoryNode
from deepvm.store.urls import open_stores
from tests.support.fetcher import BLOCK, Fetcher, Work, opened, restore, save
from tests.support.relay import Relay
from tests.support.waiting import wait_until

Fetch = Callable[..., Fetcher]
NodeOf = Callable[..., MemoryNode]


def flip_a_byte(node: MemoryNode, chunk: int, step: int) -> None:
    """In the node's memory, behind everybody's back."""
    (run,) = node.runs
    with run.checkpoints[step].chunk(chunk) as view:
        view[len(view) // 2] ^= 0xFF


def test_what_was_fetched_is_restored_bit_for_bit_and_then_removed(
    url: str, run: str, fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = save(url, run, 1, 2)
    fetcher = fetch(url)
    told = fetcher.result()
    assert (told["run"], told["step"], told["store"], told["passed_over"]) == (run, 2, url, [])
    assert told["path"] == str(fetcher.path)
    with caplog.at_level(logging.INFO):
        assert restore(url, run) == (2, truth[2])
    assert f"restored step 2 from fetched://{fetcher.path}" in caplog.text
    assert f"chunks had been fetched from {url}" in caplog.text
    assert fetcher.end()[0] == 0  # nothing is left to keep
    assert not fetcher.path.exists()


def test_a_restore_begins_while_the_fetcher_still_fills(node_of: NodeOf, run: str, fetch: Fetch) -> None:
    with Relay(node_of().address) as relay:
        url = f"memory://{relay.address}?connections=1"
        truth = save(url, run, 1)
        relay.hold_after = 4 * BLOCK
        fetch(url)
        found = opened(run)
        relay.hold_after = None
        wait_until(lambda: found.chunks_present >= 2, "a chunk or two")
        results: list[Any] = []
        trainer = threading.Thread(target=lambda: results.append(restore(url, run)))
        trainer.start()
        trainer.join(0.3)
        assert not results, "the trainer did not wait for what was to come"
        assert 0 < found.chunks_present < len(found.about.manifest.digests)
        relay.release()
        trainer.join(20)
        assert results == [(1, truth[1])]
        found.close()


def test_a_fetcher_killed_in_the_middle_leaves_the_rest_to_the_trainer(
    node_of: NodeOf, run: str, fetch: Fetch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_reader, "STALL_S", 3600.0)  # its death is seen by its lock, long before
    with Relay(node_of().address) as relay:
        url = f"memory://{relay.address}?connections=1"
        truth = save(url, run, 1)
        relay.hold_after = 4 * BLOCK
        fetcher = fetch(url)
        found = opened(run)
        relay.hold_after = None  # for the trainer's own connections
        wait_until(lambda: found.chunks_present >= 2, "a chunk or two")
        killed = threading.Timer(0.2, fetcher.kill)  # while the trainer waits
        killed.start()
        with caplog.at_level(logging.INFO):
            assert restore(url, run) == (1, truth[1])
        killed.join()
        assert "the fetcher did not bring" in caplog.text
        assert not fetcher.path.exists()
        found.close()


def test_a_fetcher_that_stalls_is_not_waited_for_without_end(
    node_of: NodeOf, run: str, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_reader, "STALL_S", 0.3)
    with Relay(node_of().address) as relay:
        url = f"memory://{relay.address}?connections=1"
        truth = save(url, run, 1)
        relay.hold_after = 4 * BLOCK
        fetcher = fetch(url)
        opened(run).close()
        relay.hold_after = None
        assert restore(url, run) == (1, truth[1])
        code, said = fetcher.end()  # it sees that nobody wants more, and ends
        assert code == 0
        assert "nothing needs it" in said


def test_a_trainer_waits_for_a_fetcher_that_has_not_chosen_yet(
    node_of: NodeOf, run: str, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Relay(node_of().address) as relay:
        url = f"memory://{relay.address}?connections=1"
        save(url, run, 1)
        relay.hold_after = 0
        fetcher = fetch(url)
        wait_until(fetcher.path.exists)
        with monkeypatch.context() as patch:
            patch.setattr(segment_reader, "CHOOSE_S", 0.1)
            assert segment_reader.find_segment(run) is None
        threading.Timer(0.2, relay.release).start()
        opened(run).close()


def test_a_damaged_chunk_comes_from_its_other_copy(node_of: NodeOf, run: str, fetch: Fetch) -> None:
    nodes = [node_of(), node_of()]
    url = f"memory://{nodes[0].address},{nodes[1].address}?replicas=2"
    truth = save(url, run, 1)
    flip_a_byte(nodes[0], 2, 1)
    fetcher = fetch(url)
    assert fetcher.result()["step"] == 1
    assert restore(url, run) == (1, truth[1])
    assert "was damaged" in fetcher.end()[1]


def test_a_chunk_that_no_node_has_whole_comes_from_the_next_store(
    node_of: NodeOf, run: str, fetch: Fetch, tmp_path: Path
) -> None:
    node = node_of()
    stores = [f"memory://{node.address}", f"file://{tmp_path}"]
    truth = save(stores, run, 1, durable=True)
    flip_a_byte(node, 2, 1)
    told = fetch(*stores).result()
    assert told["step"] == 1
    assert told["store"] == ", ".join(stores)
    assert "chunk 2" in told["passed_over"][0]
    assert restore(stores, run) == (1, truth[1])


def test_an_older_checkpoint_is_fetched_where_the_newest_is_damaged_everywhere(
    node_of: NodeOf, run: str, fetch: Fetch
) -> None:
    node = node_of()
    url = f"memory://{node.address}"
    truth = save(url, run, 1, 2)
    flip_a_byte(node, 2, 2)
    told = fetch(url).result()
    assert told["step"] == 1
    assert "step 2" in told["passed_over"][0]
    assert restore(url, run) == (1, truth[1])


def test_a_stale_segment_does_not_come_before_a_newer_checkpoint(url: str, run: str, fetch: Fetch) -> None:
    save(url, run, 1)
    fetcher = fetch(url)
    assert fetcher.result()["step"] == 1
    truth = save(url, run, 2, seed=5)
    assert restore(url, run) == (2, truth[2])
    assert not fetcher.path.exists()  # of no more use


def test_a_segment_of_a_run_that_was_begun_anew_is_not_used(
    url: str, run: str, fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    save(url, run, 7)
    fetch(url).result()
    (store,) = open_stores(url)
    store.delete(run, 7)
    store.close()
    truth = save(url, run, 1, seed=5)
    assert restore(url, run) == (1, truth[1])
    assert "no store has such a checkpoint any more" in caplog.text


def test_a_segment_of_the_same_step_with_other_bytes_is_not_used(url: str, run: str, fetch: Fetch) -> None:
    save(url, run, 1)
    fetch(url).result()
    truth = save(url, run, 1, seed=5)
    assert restore(url, run) == (1, truth[1])


def test_what_was_fetched_outlives_the_store_it_came_from(node_of: NodeOf, run: str, fetch: Fetch) -> None:
    node = node_of()
    url = f"memory://{node.address}"
    truth = save(url, run, 1)
    fetch(url).result()
    work = Work(seed=99)
    with Checkpointer(work.state, url, run=run) as ckpt:
        node.stop(now=True)
        assert ckpt.restore() == 1
        assert work.digest() == truth[1]


def test_two_ranks_of_a_machine_both_take_it_and_the_second_removes_it(
    url: str, run: str, fetch: Fetch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = save(url, run, 1)
    fetcher = fetch(url)
    fetcher.result()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in (1, 0):
        assert fetcher.path.exists()
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert restore(url, run) == (1, truth[1])
        assert "from fetched:" in caplog.text
    assert not fetcher.path.exists()


def test_a_restore_that_fails_leaves_the_segment_for_the_next_try(url: str, run: str, fetch: Fetch) -> None:
    truth = save(url, run, 1)
    fetcher = fetch(url)
    fetcher.result()
    other = Work(width=32)
    with Checkpointer(other.state, url, run=run) as ckpt, pytest.raises(Exception, match="another model"):
        ckpt.restore()
    assert fetcher.path.exists()
    assert restore(url, run) == (1, truth[1])


def test_the_environment_names_another_place_or_none(
    url: str, run: str, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = save(url, run, 1)
    place = tmp_path / "segment"
    fetch(url, "--into", str(place)).result()
    monkeypatch.setenv(segment.PATH_VARIABLE, "")
    assert restore(url, run) == (1, truth[1])
    assert place.exists()
    monkeypatch.setenv(segment.PATH_VARIABLE, str(place))
    assert restore(url, run) == (1, truth[1])
    assert not place.exists()


def test_a_rank_without_a_segment_speaks_for_those_that_have_one(url: str, run: str) -> None:
    save(url, run, 1, 2)
    stores = open_stores(url)
    empty = FetchedStore(None, stores, run)
    assert empty.steps(run) == [2]
    manifest = empty.manifest(run, 2)
    buffer = memoryview(bytearray(BLOCK))
    empty.read_chunk(manifest, 0, buffer)
    assert (empty.origin(manifest), empty.is_prefetched(manifest)) == (url, False)
    assert json.loads(bytes(buffer[8 : 8 + int.from_bytes(buffer[:8], "little")]))
    assert empty.steps("another") == []
    assert empty.map(manifest) is None
    with pytest.raises(StoreError, match="for reading"):
        empty.delete(run, 2)
    with pytest.raises(StoreError, match="for reading"):
        empty.writer(run, 3, size_bytes=1, chunk_bytes=1)
    stores[0].close()


def test_a_requested_end_is_an_orderly_end(url: str, run: str, fetch: Fetch) -> None:
    save(url, run, 1)
    fetcher = fetch(url)
    fetcher.result()
    fetcher.process.send_signal(signal.SIGTERM)
    assert fetcher.end()[0] == 0
    assert not fetcher.path.exists()


def shared_mappings(tensor: torch.Tensor) -> list[str]:
    """The mappings that a tensor lies in and that another process could write to, or that are a file."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        place, rights, _, _, inode, *_ = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in place.split("-"))
        within = first < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < last
        if within and (rights.endswith("s") or inode != "0"):
            found.append(line)
    return found


@pytest.mark.parametrize("lazy", [False, True])
def test_no_other_process_can_write_to_what_a_trainer_keeps(url: str, run: str, fetch: Fetch, lazy: bool) -> None:
    truth = save(url, run, 1)
    fetch(url).result()
    work = Work(seed=99)
    with Checkpointer(work.state, url, run=run) as ckpt:
        assert ckpt.restore(lazy=lazy) == 1
        assert ckpt.restored is not None
        assert ckpt.restored.fetched
        ckpt.finish_restore()
        kept = [value for state in work.optimizer.state.values() for value in state.values()]
        kept += work.model.parameters()
        assert [shared_mappings(tensor) for tensor in kept if isinstance(tensor, torch.Tensor)] == [[]] * len(kept)
        child = os.fork()
        if child == 0:  # a forked evaluator that trains a few steps on its own copy
            for tensor in kept:
                tensor.detach().fill_(99.0)
            os._exit(0)
        os.waitpid(child, 0)
        assert work.digest() == truth[1]


def test_two_processes_that_restore_together_share_nothing(
    url: str, run: str, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = save(url, run, 1)
    fetch(url).result()
    stores = open_stores(url)
    first, second = fetched_before(stores, run), fetched_before(stores, run)  # both opened it before either had read
    with ExitStack() as ended:
        for found in (first, second):
            assert found is not None
            ended.callback(found.close)
            monkeypatch.setattr(prefetched, "fetched_before", lambda *_, found=found: found)
            work = Work(seed=99)
            ckpt = ended.enter_context(Checkpointer(work.state, url, run=run, policy="every 100000 steps"))
            assert ckpt.restore() == 1
            assert work.digest() == truth[1]
            work.step()  # changes what the first one keeps, and nothing else
    stores[0].close()


def test_a_lazy_restore_takes_what_was_fetched_and_lets_go_of_it_at_the_end(
    url: str, run: str, fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = save(url, run, 1)
    fetcher = fetch(url)
    fetcher.result()
    work = Work(seed=99)
    with Checkpointer(work.state, url, run=run) as ckpt, caplog.at_level(logging.INFO):
        assert ckpt.restore(lazy=True) == 1
        ckpt.finish_restore()
        assert work.digest() == truth[1]
    assert f"from fetched://{fetcher.path}" in caplog.text
    assert fetcher.end()[0] == 0
    assert not fetcher.path.exists()


def test_another_job_of_the_same_run_s_name_leaves_the_segment_alone(
    node_of: NodeOf, url: str, run: str, fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = save(url, run, 1)
    fetcher = fetch(url)
    fetcher.result()
    other = f"memory://{node_of().address}"
    others = save(other, run, 1, seed=5)
    assert restore(other, run) == (1, others[1])
    assert fetcher.path.exists()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert restore(url, run) == (1, truth[1])
    assert "from fetched:" in caplog.text


def test_what_is_fetched_into_shared_memory_is_not_durable(run: str) -> None:
    assert not FetchedStore(None, (), run).durable
