"""torch.distributed.checkpoint through memory nodes: real gloo groups, FSDP2, saved on 4 ranks and loaded on others."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.dcp import DeepvmReader, DeepvmWriter
from deepvm.checkpoint.dcp.metadata import decode, decode_object, encode, encode_object
from deepvm.errors import Corrupt, UsageError
from deepvm.memnode import MemoryNode
from deepvm.store.base import Manifest
from deepvm.store.safetensors import Header, TensorEntry
from deepvm.store.urls import open_store
from deepvm.store.verify import copy
from tests.support.checkpoint.dcp_ranks import (
    OBJECTS,
    die_before_the_end,
    load_on_ranks,
    run_ranks,
    save_into_files,
    save_on_ranks,
)

MIB = 2**20


@pytest.fixture(scope="module")
def node() -> Iterator[MemoryNode]:
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=512 * MIB, block_bytes=MIB) as running:
        yield running
        running.stop(now=True)  # what a killed rank left unfinished is not waited for


@pytest.fixture(scope="module")
def url(node: MemoryNode) -> str:
    return f"memory://{node.address}"


@pytest.fixture
def store(url: str) -> Iterator[Any]:
    with closing(open_store(url)) as opened:
        yield opened


@pytest.fixture(scope="module")
def saved(node: MemoryNode, url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 4 ranks saved: the folder with the truth."""
    folder = tmp_path_factory.mktemp("ranks")
    assert run_ranks(save_on_ranks, 4, folder, url) == [0, 0, 0, 0]
    return folder


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def truth_of(saved: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(saved / name, weights_only=True)
    return found


def blank(state: Any) -> Any:
    """The same shapes, with nothing in them."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(item) for item in state] if isinstance(state, list) else None


def alone(action: Any, state: dict[str, Any], **options: Any) -> None:
    with pytest.warns(UserWarning, match="single process"):
        action(state, **options)


@pytest.mark.parametrize(
    ("run", "name"), [("sharded", "truth-1.pt"), ("async", "truth-2.pt"), ("cached", "truth-4.pt")]
)
def test_what_4_ranks_saved_is_loaded_by_one_bit_for_bit(saved: Path, url: str, run: str, name: str) -> None:
    truth = truth_of(saved, name)
    state = {**blank(truth), **dict.fromkeys(OBJECTS)}
    alone(dcp.load, state, storage_reader=DeepvmReader(url, run=run))
    assert equal(state, {**truth, **OBJECTS})


def test_what_4_ranks_saved_is_loaded_by_3_bit_for_bit(saved: Path, url: str, store: Any) -> None:
    assert run_ranks(load_on_ranks, 3, saved, url, "sharded", "loaded.pt") == [0, 0, 0]
    assert equal(truth_of(saved, "loaded.pt"), truth_of(saved, "truth-1.pt"))
    size_bytes = store.manifest("sharded", 1).size_bytes
    read_bytes = [int((saved / f"loaded.pt.read-{rank}").read_text()) for rank in range(3)]
    assert all(n < 0.8 * size_bytes for n in read_bytes)  # not everything on every rank


def test_any_safetensors_reader_opens_what_the_ranks_saved(saved: Path, url: str, store: Any, tmp_path: Path) -> None:
    copy(store, open_store(tmp_path), "sharded", 1)
    tensors = load_file(tmp_path / "sharded" / "step-000000000001.safetensors")
    truth = truth_of(saved, "truth-1.pt")
    rows = [tensors[name] for name in sorted(tensors, key=_first_offset) if name.startswith("model.1.weight@")]
    assert len(rows) == 4
    assert torch.equal(torch.cat(rows), truth["model"]["1.weight"])
    columns = [tensors[name] for name in sorted(tensors, key=_last_offset) if name.startswith("columns@")]
    assert torch.equal(torch.cat(columns, 1), truth["columns"])
    assert tensors["optimizer.state.1.weight.step"].item() == 1.0
    state = {**blank(truth), **dict.fromkeys(OBJECTS)}
    alone(
        dcp.load, state, storage_reader=DeepvmReader([url.replace("127.0.0.1", "127.0.0.2"), tmp_path], run="sharded")
    )
    assert equal(state, {**truth, **OBJECTS})  # from the next store, as the nearest has gone


def _first_offset(name: str) -> int:
    return int(name.partition("@")[2].split(",")[0] or -1)


def _last_offset(name: str) -> int:
    return int(name.partition("@")[2].split(",")[-1] or -1)


def test_a_state_is_rebuilt_without_a_model(saved: Path, url: str) -> None:
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=DeepvmReader(url, run="sharded"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert equal(state["model"], truth_of(saved, "truth-1.pt")["model"])
    assert {key: state[key] for key in OBJECTS} == OBJECTS


def test_a_coordinator_killed_before_the_end_leaves_no_checkpoint(url: str, store: Any, tmp_path: Path) -> None:
    codes = run_ranks(die_before_the_end, 2, tmp_path, url)
    assert codes[0] == -9
    assert store.steps("dying") == [1]
    state = {"weight": torch.zeros(100, 10)}
    alone(dcp.load, state, storage_reader=DeepvmReader(url, run="dying"))
    assert torch.equal(state["weight"], torch.ones(100, 10))


def test_for_several_ranks_the_error_names_memory_stores(tmp_path: Path) -> None:
    assert run_ranks(save_into_files, 2, tmp_path) == [0, 0]


@pytest.mark.parametrize("place", ["memory", "files"])
def test_one_process_saves_anywhere_and_any_type(url: str, tmp_path: Path, place: str) -> None:
    where = url if place == "memory" else str(tmp_path)
    state = {
        "half": torch.randn(3, 5).half(),
        "turned": torch.randn(40, 30).t(),
        "large": torch.arange(3 * MIB // 4, dtype=torch.int32).reshape(512, -1),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7, dtype=torch.uint8),
        "truths": torch.tensor([True, False]),
        "f8": torch.randn(9).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, 3, dtype=torch.complex128),
        "nested": [{"x": torch.ones(2), "y": 3}, "text"],
    }
    alone(dcp.save, state, storage_writer=DeepvmWriter(where, run="types", step=5))
    found = {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else blank(v) for key, v in state.items()}
    found["turned"] = torch.zeros(40, 30).t()
    alone(dcp.load, found, storage_reader=DeepvmReader(where, run="types", step=5))
    assert found["f8"].view(torch.uint8).equal(state["f8"].view(torch.uint8))
    del found["f8"], state["f8"]
    assert equal(found, state)


def test_a_load_reads_no_more_chunks_than_it_needs(url: str) -> None:
    state = {f"layer{i}": torch.randn(MIB // 4) for i in range(8)}
    alone(dcp.save, state, storage_writer=DeepvmWriter(url, run="few", step=1))
    reader = DeepvmReader(url, run="few")
    one = {"layer3": torch.zeros(MIB // 4)}
    alone(dcp.load, one, storage_reader=reader)
    assert torch.equal(one["layer3"], state["layer3"])
    assert reader.bytes_read <= 2 * MIB


def test_a_writer_that_saves_again_sends_what_changed(url: str, store: Any) -> None:
    state = {f"layer{i}": torch.randn(MIB // 4) for i in range(8)}
    writer = DeepvmWriter(url, run="again")
    sent = []
    for step in (1, 2):
        before = _received(store)
        alone(dcp.save, state, storage_writer=writer, checkpoint_id=f"step-{step}")
        sent.append(_received(store) - before)
        if step == 1:
            state["layer3"].add_(1)
    assert sent[1] < 0.4 * sent[0]
    found = blank(state)
    alone(dcp.load, found, storage_reader=DeepvmReader(url, run="again"))
    assert equal(found, state)


def _received(store: Any) -> int:
    return int(store.status(store.nodes[0])["bytes_in"])


def test_damaged_bytes_are_not_loaded(tmp_path: Path) -> None:
    alone(dcp.save, {"x": torch.randn(MIB)}, storage_writer=DeepvmWriter(tmp_path, run="bad", step=1))
    path = tmp_path / "bad" / "step-000000000001.safetensors"
    with path.open("r+b") as file:
        file.seek(-100, io.SEEK_END)
        file.write(b"????")
    with pytest.raises(dcp.CheckpointException, match="is not what was saved"):
        alone(dcp.load, {"x": torch.zeros(MIB)}, storage_reader=DeepvmReader(tmp_path, run="bad"))


def test_what_cannot_be_loaded_or_saved_is_reported(url: str, store: Any, tmp_path: Path) -> None:
    x = {"x": torch.zeros(3)}
    alone(dcp.save, x, storage_writer=DeepvmWriter(url, run="right", step=1))
    with pytest.raises(dcp.CheckpointException, match=r"no checkpoint of run wrong can be loaded.*right"):
        alone(dcp.load, x, storage_reader=DeepvmReader(url, run="wrong"))
    with pytest.raises(dcp.CheckpointException, match=r"step 9 of run right.*its steps 1"):
        alone(dcp.load, x, storage_reader=DeepvmReader(url, run="right", step=9))
    with Checkpointer({"x": torch.zeros(3)}, str(tmp_path), run="other") as ckpt:
        ckpt.save(1).wait("remote", 20)
    with pytest.raises(dcp.CheckpointException, match=r"restore it with deepvm\.Checkpointer"):
        alone(dcp.load, x, storage_reader=DeepvmReader(tmp_path, run="other"))
    with pytest.raises(dcp.CheckpointException, match="cannot be saved"):
        alone(dcp.save, {"thing": object()}, storage_writer=DeepvmWriter(url, run="right", step=2))
    with pytest.raises(dcp.CheckpointException, match="raise object_bytes"):
        alone(dcp.save, {"text": "x" * 3 * MIB}, storage_writer=DeepvmWriter(url, run="right", step=2))
    with pytest.raises(dcp.CheckpointException, match="needs a step"):
        alone(dcp.save, x, storage_writer=DeepvmWriter(url, run="right"))
    with pytest.raises(UsageError, match="has no step"):
        alone(dcp.save, x, storage_writer=DeepvmWriter(url, run="right"), checkpoint_id="newest")
    alone(
        dcp.save, {"text": "x" * 3 * MIB}, storage_writer=DeepvmWriter(url, run="right", step=2, object_bytes=4 * MIB)
    )
    assert store.steps("right") == [1, 2]


def test_nothing_is_pickled_into_a_store(tmp_path: Path) -> None:
    alone(dcp.save, {"x": torch.zeros(3), **OBJECTS}, storage_writer=DeepvmWriter(tmp_path, run="plain", step=1))
    data = (tmp_path / "plain" / "step-000000000001.safetensors").read_bytes()
    assert b'"format":"deepvm-dcp/1"' in data
    assert not any(mark in data for mark in (b"archive/data.pkl", b"PK\x03\x04", b"ctorch", b"\x80\x02}"))
    manifest = Manifest.from_bytes((tmp_path / "plain" / "step-000000000001.json").read_bytes())
    assert manifest.facts["format"] == "deepvm-dcp/1"


def test_a_dead_replica_loses_nothing(node: MemoryNode) -> None:
    url = f"memory://{node.address},127.0.0.1:9?replicas=2"
    state = {f"layer{i}": torch.randn(MIB // 4) for i in range(4)}
    writer = pickle.loads(pickle.dumps(DeepvmWriter(url, run="half", step=1)))  # noqa: S301 - as torch's own save process gets it
    alone(dcp.save, state, storage_writer=writer)
    found = blank(state)
    alone(dcp.load, found, storage_reader=DeepvmReader(url, run="half"))
    assert equal(found, state)


GOLDEN = {
    "tensors": {
        "w": {
            "dtype": "float32",
            "size": [3, 2],
            "requires_grad": True,
            "shards": [["w@0,0", [0, 0], [2, 2]], ["w@2,0", [2, 0], [1, 2]]],
        }
    },
    "objects": {"lr": {"value": 0.5}, "z": {"value": {"$tensor": "z"}, "tensors": {"z": ["int16", [2], "AQACAA=="]}}},
    "planner": {"value": {"w": {"$tuple": ["model", "w"]}}},
}


def golden_header(document: dict[str, Any]) -> Header:
    entries = (
        TensorEntry(name="w@0,0", dtype="F32", shape=(2, 2), offset=4096, size_bytes=16),
        TensorEntry(name="w@2,0", dtype="F32", shape=(1, 2), offset=4112, size_bytes=8),
    )
    return Header(tensors=entries, metadata={"format": "deepvm-dcp/1", "dcp": json.dumps(document)})


def test_the_format_is_read_as_it_is_written_down() -> None:
    contents = decode(golden_header(GOLDEN))
    metadata = contents.metadata
    assert metadata.state_dict_metadata["w"].size == torch.Size([3, 2])
    assert metadata.state_dict_metadata["w"].properties.dtype is torch.float32
    assert metadata.storage_data[MetadataIndex("w", [2, 0])].entry.offset == 4112
    assert metadata.planner_data == {"w": ("model", "w")}
    assert decode_object(contents.objects["lr"]) == 0.5
    assert decode_object(contents.objects["z"]).tolist() == [1, 2]
    names = {MetadataIndex("w", [0, 0]): "w@0,0", MetadataIndex("w", [2, 0]): "w@2,0"}
    assert json.loads(encode(metadata, names, contents.objects)["dcp"]) == GOLDEN


def test_a_tensor_within_an_object_keeps_its_shape_type_and_bytes() -> None:
    value = {"a": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(), "b": [torch.empty(0, 2), "text"]}
    document = json.loads(json.dumps(encode_object(value, "value")))
    found = decode_object(document)
    assert torch.equal(found["a"], value["a"])
    assert found["a"].dtype is torch.int16
    assert found["b"][0].shape == (0, 2)
    assert found["b"][1] == "text"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": "float64"},
        {"shards": [["v", [0, 0], [2, 2]]]},
        {"shards": [["w@0,0", [0, 0], [-2, -2]]]},
        {"shards": 7},
        {"size": "big"},
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    document = {**GOLDEN, "tensors": {"w": {**GOLDEN["tensors"]["w"], **change}}}
    with pytest.raises(Corrupt):
        decode(golden_header(document))
