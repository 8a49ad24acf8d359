"""What a planner, a caller or another rank may not do, and what such a failure leaves behind: nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan

from deepvm.checkpoint.dcp import DeepvmReader, DeepvmWriter
from deepvm.checkpoint.dcp.metadata import Shard, encode
from deepvm.checkpoint.dcp.tensor_reads import Read, read_all
from deepvm.errors import CheckpointError, UsageError
from deepvm.memnode import MemoryNode
from deepvm.store.base import Manifest
from deepvm.store.files.store import FileStore
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import publish_share, seal_share
from deepvm.store.safetensors import TensorEntry
from deepvm.store.urls import open_store
from tests.support.memnode.client import BLOCK, chunks_of, content, digest_of, manifest_of

STATE = {"w": torch.arange(6.0).reshape(2, 3), "lr": 0.5}


class OtherType(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return "text"


class OtherShape(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return torch.zeros(3, 2, dtype=torch.float16)


class WithoutObjects(dcp.DefaultSavePlanner):
    lookup_object = None  # type: ignore[assignment]


@pytest.mark.parametrize("place", ["memory", "files"])
@pytest.mark.parametrize(
    ("planner", "problem"),
    [
        (OtherType, "the planner gives a str for tensor w"),
        (OtherShape, r"w was planned as torch.float32 \[2, 3\], and is torch.float16 \[3, 2\]"),
        (WithoutObjects, "WithoutObjects has no lookup_object, so lr could only be pickled"),
    ],
)
def test_a_planner_that_breaks_its_promise_fails_the_save_and_leaves_nothing(
    place: str, planner: Callable[[], Any], problem: str, start_node: Callable[..., MemoryNode], tmp_path: Path
) -> None:
    url = f"memory://{start_node().address}" if place == "memory" else str(tmp_path)
    writer = DeepvmWriter(url, run="r", step=1)
    with pytest.raises(dcp.CheckpointException, match=problem), pytest.warns(UserWarning, match="single process"):
        dcp.save(STATE, storage_writer=writer, planner=planner())
    with closing(open_store(url)) as store:
        assert store.steps("r") == []
        if (nodes := store.memory_nodes()) is not None:
            assert nodes.status(nodes.nodes[0])["uploads"] == 0
    assert [path for path in tmp_path.rglob("*") if path.suffix not in ("", ".lock")] == []


def test_a_save_needs_collectives_one_writer_for_cached_plans_and_one_step_for_all_ranks(tmp_path: Path) -> None:
    writer = DeepvmWriter(tmp_path, run="r", step=3)
    with pytest.raises(UsageError, match="save it with use_collectives=True"):
        writer.set_up_storage_writer(True, use_collectives=False)
    writer.set_up_storage_writer(True, use_collectives=True)
    with pytest.raises(UsageError, match="this planner caches plans: use one DeepvmWriter for all saves"):
        writer.prepare_global_plan([SavePlan([], usable=False)])
    (plan,) = writer.prepare_global_plan([SavePlan([])])
    other = replace(plan, storage_data=replace(plan.storage_data, step=2, rank=1))
    with pytest.raises(CheckpointError, match="rank 1 saves step 3, the coordinator step 2"):
        writer.write_data(other, dcp.DefaultSavePlanner())


def test_a_save_removes_what_an_earlier_one_left_uncommitted(start_node: Callable[..., MemoryNode]) -> None:
    nodes = [start_node(buffers=4) for _ in range(2)]
    url = "memory://" + ",".join(node.address for node in nodes)
    data = content(3, 2 * BLOCK)
    with closing(MemoryStore([node.address for node in nodes], session="before")) as store:
        manifest = manifest_of(data, "r", 1, nodes=store.nodes)
        writer = store.writer("r", 1, size_bytes=len(data), chunk_bytes=BLOCK)
        for number, chunk in enumerate(chunks_of(data)):
            writer.put(number, [memoryview(chunk)], digest_of(chunk))
        connection = store.connect(store.nodes[0], "r", write=True)
        seal_share(connection, manifest, 0, 5.0)
        publish_share(connection, 1, 0, manifest.to_bytes())
        connection.close()
        writer.abort()
        assert store.uncommitted_steps("r") == {1: [store.nodes[0]]}
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(STATE, storage_writer=DeepvmWriter(url, run="r", step=2))
        assert store.uncommitted_steps("r") == {}
        assert store.steps("r") == [2]


def test_a_checkpoint_id_is_valid_if_it_ends_with_a_step() -> None:
    ids = ("step-100", "runs/7//", "100", "newest", "step-1a", "")
    assert [DeepvmWriter.validate_checkpoint_id(each) for each in ids] == [True, True, True, False, False, False]


def test_every_store_that_a_reader_opens_is_closed_whether_it_loads_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(3)}, storage_writer=DeepvmWriter(tmp_path / "b", run="r", step=1))
    closed: list[str] = []
    real = FileStore.close

    def close(self: FileStore) -> None:
        closed.append(self.root.name)
        real(self)

    monkeypatch.setattr(FileStore, "close", close)
    reader = DeepvmReader([tmp_path / "a", tmp_path / "b"], run="r")
    state = {"w": torch.zeros(3)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=reader)
    assert state["w"].tolist() == [1.0, 1.0, 1.0]
    assert (reader.step, closed) == (1, ["a", "b"])
    with (
        pytest.raises(dcp.CheckpointException, match=r"no checkpoint of step 2 of run r can be loaded: .*/a has runs "),
        pytest.warns(UserWarning, match="single process"),
    ):
        dcp.load(state, storage_reader=DeepvmReader([tmp_path / "a", tmp_path / "b"], run="r", step=2))
    assert closed == ["a", "b"] * 2


def test_ranks_that_found_different_newest_steps_do_not_load(tmp_path: Path) -> None:
    reader = DeepvmReader(tmp_path, run="r")
    plans = [LoadPlan([], storage_data=step) for step in (2, 2, 1)]
    assert reader.prepare_global_plan(plans[:2]) == plans[:2]
    with pytest.raises(CheckpointError, match=r"the ranks found different newest steps \(\[1, 2\]\): pass step="):
        reader.prepare_global_plan(plans)


def test_a_value_that_no_rank_wrote_is_not_committed() -> None:
    with pytest.raises(CheckpointError, match=r"^lr was planned, but no rank wrote it"):
        encode(Metadata({"lr": BytesStorageMetadata()}), {}, {})


def _read(lengths: list[int], tensor: torch.Tensor, at: int, shape: tuple[int, ...]) -> Read:
    index = MetadataIndex("w")
    offsets = torch.Size([0] * len(lengths))
    item = ReadItem(LoadItemType.TENSOR, index, offsets, index, offsets, torch.Size(lengths))
    entry = TensorEntry(name="w", dtype="F32", shape=shape, offset=at, size_bytes=4 * torch.Size(shape).numel())
    return Read(item, Shard(entry, torch.float32, shape), tensor)


def test_every_read_is_committed_once_also_one_of_nothing(tmp_path: Path) -> None:
    data = torch.arange(64, dtype=torch.float32)
    raw = data.view(torch.uint8).numpy().tobytes()
    with closing(FileStore(tmp_path)) as store:
        chunks = [raw[:128], raw[128:]]
        writer = store.writer("r", 1, size_bytes=256, chunk_bytes=128)
        digests = [xxhash.xxh3_64_intdigest(chunk) for chunk in chunks]
        for number, chunk in enumerate(chunks):
            writer.put(number, [memoryview(chunk)], digests[number])
        manifest = Manifest(run="r", step=1, size_bytes=256, chunk_bytes=128, digests=digests, created_s=0.0)
        writer.publish(manifest)
        reads = [
            _read([64], torch.zeros(64), 0, (64,)),
            _read([0, 4], torch.zeros(0, 4), 16, (2, 4)),
            _read([2, 0], torch.zeros(2, 0), 16, (2, 4)),
            _read([4, 3], torch.zeros(4, 3), 0, (4, 4)),
            _read([], torch.zeros(()), 252, ()),
        ]
        done: list[Any] = []
        lock = threading.Lock()

        def commit(item: Any, tensor: torch.Tensor) -> None:
            with lock:
                done.append((item, tensor))

        assert read_all(store, manifest, reads, SimpleNamespace(commit_tensor=commit)) == 256  # type: ignore[arg-type]
    assert sorted(id(tensor) for _, tensor in done) == sorted(id(read.tensor) for read in reads)
    assert all(any(item is read.item and tensor is read.tensor for item, tensor in done) for read in reads)
    assert torch.equal(reads[0].tensor, data)
    assert torch.equal(reads[3].tensor, data[:16].view(4, 4)[:, :3])
    assert reads[4].tensor.item() == 63.0
    assert [read.chunks(128) for read in reads] == [range(2), range(0), range(0), range(1), range(1, 2)]
    with pytest.raises(CheckpointError, match=r"^w has \(3,\), the plan \(4,\)"):
        _read([4], torch.zeros(3), 0, (4,))
