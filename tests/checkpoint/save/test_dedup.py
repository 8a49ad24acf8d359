"""What checkpoints have in common is sent and kept once; where they have nothing in common, nothing is spent on it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.dcp import DeepvmReader, DeepvmWriter
from deepvm.checkpoint.save.dedup import RETRY_SAVES, DedupHistory
from deepvm.checkpoint.state.layout import HEADER_STEP_BYTES, LARGE_HEADER_BYTES, make_layout, read_header
from deepvm.memnode import MemoryNode
from deepvm.store.urls import open_store
from tests.support.checkpoint.fine_tuning import Tuned, tune
from tests.support.checkpoint.processes import Forked, nodes, url_of
from tests.support.waiting import wait_until

BLOCK = 64 * 1024
Start = Callable[..., MemoryNode]


@pytest.fixture
def start_node(start_node: Start) -> Start:
    return partial(start_node, capacity_bytes=512 * BLOCK)


def saved(tuned: Tuned, url: str, run: str, steps: int = 1) -> list[tuple[int, int]]:
    """Save, step and save again; the bytes that each save sent and kept."""
    told = []
    with Checkpointer(tuned.state, url, run=run) as ckpt:
        for step in range(1, steps + 1):
            tuned.step()
            handle = ckpt.save(step)
            handle.wait("remote", 20)
            told.append((handle.bytes_sent, handle.bytes_kept))
    return told


def assert_restores(tuned: Tuned, url: str, run: str, step: int, rank: int = 24) -> None:
    fresh = Tuned(seed=99, rank=rank)
    with Checkpointer(fresh.state, url, run=run) as ckpt:
        assert ckpt.restore() == step
    assert all(torch.equal(a, b) for a, b in zip(fresh.bytes(), tuned.bytes(), strict=True))


def forget(url: str, run: str) -> None:
    with closing(open_store(url)) as store:
        for step in store.steps(run):
            store.delete(run, step)


def most_new_bytes(tuned: Tuned) -> int:
    """What is the run's own, the header, and the chunks at the borders between that and the base."""
    return tuned.own_bytes + 128 * 1024 + 3 * BLOCK


def test_a_second_run_from_one_base_model_sends_and_keeps_only_its_own(node: MemoryNode) -> None:
    url = f"memory://{node.address}"
    first, second = Tuned(seed=1), Tuned(seed=2, rank=40)
    ((sent, kept),) = saved(first, url, "first")
    assert (sent > first.base_bytes, kept) == (True, 0)
    used = node.arena.used * BLOCK
    ((sent, kept),) = saved(second, url, "second")
    assert sent < most_new_bytes(second) < second.base_bytes / 3
    assert kept > second.base_bytes - 3 * BLOCK
    assert node.arena.used * BLOCK - used == -(-sent // BLOCK) * BLOCK
    assert_restores(first, url, "first", 1)
    assert_restores(second, url, "second", 1, rank=40)
    forget(url, "first")
    assert_restores(second, url, "second", 1, rank=40)
    forget(url, "second")
    assert (node.arena.used, node.arena.reserved) == (0, 0)


def test_a_base_model_is_found_wherever_a_run_lists_it(node: MemoryNode) -> None:
    url = f"memory://{node.address}"
    saved(Tuned(seed=1), url, "first")
    second = Tuned(seed=2)
    second.step()
    state = {"frozen": second.base, "trained": second.adapter, "all": second.optimizer}
    with Checkpointer(state, url, run="second") as ckpt:
        handle = ckpt.save(1)
        handle.wait("remote", 20)
        assert handle.bytes_sent < most_new_bytes(second)


def test_runs_share_over_two_nodes_with_replicas(start_node: Start) -> None:
    started = [start_node(), start_node()]
    url = f"memory://{','.join(node.address for node in started)}?replicas=2"
    first, second = Tuned(seed=1), Tuned(seed=2)
    saved(first, url, "first")
    used = [node.arena.used for node in started]
    ((sent, _),) = saved(second, url, "second")
    assert sent < 2 * most_new_bytes(second)
    assert all(
        node.arena.used - before < most_new_bytes(second) / BLOCK + 2
        for node, before in zip(started, used, strict=True)
    )
    started[0].stop(now=True)
    assert_restores(second, url, "second", 1)


def test_later_saves_send_what_changed_and_offer_nothing(node: MemoryNode) -> None:
    url = f"memory://{node.address}"
    saved(Tuned(seed=1), url, "first")
    second = Tuned(seed=2)
    told = saved(second, url, "second", steps=6)
    assert all(sent < most_new_bytes(second) for sent, _ in told)
    offered = node.counters.offered_chunks
    assert_restores(second, url, "second", 6)
    saves_of_all = sum(-(-(sent + kept) // BLOCK) for sent, kept in told)
    assert offered < saves_of_all / 2  # the first saves looked, the others did not


def test_training_that_changes_everything_stops_looking(node: MemoryNode) -> None:
    model = torch.nn.Linear(700, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer({"model": model, "optimizer": optimizer}, f"memory://{node.address}") as ckpt:
        offered, sent = [], []
        for step in range(8):
            handle = ckpt.save(step)
            model(torch.randn(2, 700)).square().mean().backward()
            optimizer.step()
            handle.wait("remote", 20)
            offered.append(node.counters.offered_chunks)
            sent.append(handle.bytes_sent + handle.bytes_kept)
    assert offered[0] > 0
    assert offered[1] > offered[0]  # with the first step's optimizer state it is another layout
    assert offered[1:] == [offered[1]] * 7
    assert node.counters.linked_chunks == 0


def test_offers_are_made_again_after_many_saves_and_for_another_layout() -> None:
    class Saved:
        bytes_offered, bytes_linked, bytes_kept, bytes_sent = 1000, 0, 0, 1000

    offers = DedupHistory()
    assert (offers.begin("a"), offers.partial_reservation) == (True, True)
    offers.learn([], failed=True)  # nothing was learned: the node was away
    assert offers.begin("a")
    offers.learn([Saved()], failed=False)
    assert [offers.begin("a") for _ in range(RETRY_SAVES)].index(True) == RETRY_SAVES - 1
    offers.learn([Saved()], failed=False)
    assert (offers.begin("a"), offers.partial_reservation) == (False, False)
    assert offers.begin("b")
    found = Saved()
    found.bytes_linked = 100
    offers.learn([found], failed=False)
    assert (offers.begin("b"), offers.partial_reservation) == (True, True)


def test_a_restarted_trainer_sends_only_what_changed(node: MemoryNode) -> None:
    url = f"memory://{node.address}"
    saved(Tuned(seed=1), url, "run", steps=2)
    again = Tuned(seed=3)
    again.step()
    with Checkpointer(again.state, url, run="run") as ckpt:
        assert ckpt.restore() == 2
        handle = ckpt.save(3)  # nothing changed at all
        handle.wait("remote", 20)
        assert handle.bytes_sent <= 3 * BLOCK
        again.step()
        handle = ckpt.save(4)
        handle.wait("remote", 20)
        assert handle.bytes_sent < most_new_bytes(again)
    assert_restores(again, url, "run", 4)


def test_after_kill_minus_nine_of_node_and_trainer_only_what_changed_is_sent(tmp_path: Path) -> None:
    with nodes(1, spill=str(tmp_path), block_bytes=BLOCK) as (node,):
        url = url_of([node])
        tuned = Tuned(seed=1)
        with Checkpointer(tuned.state, url, run="run") as ckpt:
            tuned.step()
            ckpt.save(1).wait("durable", 20)
            node.kill()
        node.start()
        again = Tuned(seed=3)
        again.step()
        with Checkpointer(again.state, url, run="run") as ckpt:
            assert ckpt.restore() == 1
            again.step()
            handle = ckpt.save(2)
            handle.wait("remote", 20)
            assert handle.bytes_sent < most_new_bytes(again)
        assert_restores(again, url, "run", 2)


def test_trainers_killed_in_the_middle_harm_no_other_run(start_node: Start) -> None:
    node = start_node(limits={"upload_idle_s": 0.3})
    url = f"memory://{node.address}"
    first = Tuned(seed=1)
    saved(first, url, "first")
    chance = random.Random(4)
    for _ in range(4):
        trainer = Forked(tune, url, "second")
        try:
            trainer.receive()
            time.sleep(chance.uniform(0.0, 0.15))
        finally:
            trainer.kill()
    assert_restores(first, url, "first", 1)
    wait_until(lambda: not any(run.uploads for run in node.runs))
    blocks = {b for run in node.runs for one in run.checkpoints.values() for b in one._blocks.values()}
    wait_until(lambda: node.arena.used == len(blocks))
    assert node.arena.reserved == 0
    forget(url, "first")
    forget(url, "second")
    assert node.arena.used == 0


def test_a_node_without_room_for_both_takes_what_the_second_run_adds(start_node: Start) -> None:
    first, second = Tuned(seed=1), Tuned(seed=2)
    node = start_node(capacity_bytes=first.base_bytes + 3 * most_new_bytes(first))
    url = f"memory://{node.address}"
    saved(first, url, "first")
    saved(second, url, "second")
    assert node.arena.free * BLOCK < second.base_bytes
    saved(second, url, "second", steps=2)
    assert_restores(first, url, "first", 1)
    assert_restores(second, url, "second", 2)


def test_a_run_with_nothing_in_common_is_refused_for_lack_of_room(start_node: Start) -> None:
    first = Tuned(seed=1)
    node = start_node(capacity_bytes=first.base_bytes + 2 * most_new_bytes(first))
    url = f"memory://{node.address}"
    saved(first, url, "first")
    used = node.arena.used
    with Checkpointer({"weights": torch.randn(1_000_000)}, url, run="large") as ckpt:
        for step, words in ((1, "step 1 needs .*--capacity"), (2, "step 2 needs")):
            handle = ckpt.save(step)
            with pytest.raises(Exception, match=words):
                handle.wait("remote", 20)
    wait_until(lambda: (node.arena.used, node.arena.reserved) == (used, 0))
    assert_restores(first, url, "first", 1)


def test_a_save_through_dcp_finds_what_another_run_has(node: MemoryNode) -> None:
    url = f"memory://{node.address}"
    state = {"weights": torch.randn(400_000), "more": torch.randn(100)}
    for run in ("first", "second"):
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(state, storage_writer=DeepvmWriter(url, run=run, step=1))
    assert node.counters.linked_chunks >= 24
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, storage_reader=DeepvmReader(url, run="second"))
    assert all(torch.equal(loaded[name], state[name]) for name in state)


# --- where tensors lie ----------------------------------------------------------------------------------------------


def test_frozen_tensors_come_first_and_optimizer_state_last(tmp_path: Path) -> None:
    tuned = Tuned(seed=1)
    tuned.step()
    with Checkpointer(tuned.state, f"file://{tmp_path}", run="run") as ckpt:
        ckpt.save(1).wait("remote", 20)
    path = tmp_path / "run" / "step-000000000001.safetensors"
    layout, _ = read_header(path.read_bytes(), path.stat().st_size)
    kinds = [entry.name.split(".")[0] for entry in layout.entries if entry.bytes % 64 == 0]
    assert kinds == sorted(kinds, key=["base", "adapter", "optimizer"].index)
    assert len(set(kinds)) == 3
    assert torch.equal(load_file(path)["adapter.0.weight"], tuned.adapter[0].weight)


def test_every_tensor_of_a_round_size_begins_at_a_multiple_of_64_bytes() -> None:
    specs = [("a", "BOOL", (3,)), ("b", "F16", (64, 3)), ("c", "F64", (1,)), ("d", "F32", (16,)), ("e", "F32", (5,))]
    layout = make_layout(specs, {}, 0, [0, 1, 0, 2, 0])
    assert [entry.name for entry in layout.entries] == ["b", "d", "c", "e", "a"]
    assert all(entry.start % 64 == 0 for entry in layout.entries[:2])
    widths = {"BOOL": 1, "F16": 2, "F32": 4, "F64": 8}
    assert all(entry.start % widths[entry.dtype] == 0 for entry in layout.entries)


@pytest.mark.parametrize(
    ("slack", "elements", "wanted"),
    [
        (10_000, 1000, 16 * 1024),
        (16_300, 1000, 32 * 1024),
        (10_000, 64 * 2**20, LARGE_HEADER_BYTES),
        (900_000, 64 * 2**20, LARGE_HEADER_BYTES),
        (1_100_000, 64 * 2**20, 2 * LARGE_HEADER_BYTES),
        (9_000_000, 64 * 2**20, 3 * HEADER_STEP_BYTES),
    ],
)
def test_headers_are_of_few_sizes(slack: int, elements: int, wanted: int) -> None:
    layout = make_layout([("a", "F32", (elements,))], {"skeleton": ""}, slack)
    assert layout.header_bytes == wanted
    header = layout.header({"skeleton": ""})
    assert header is not None
    assert len(header) == wanted
