"""All ranks' plans -> one layout; one rank's shards -> the chunks of its region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from deepvm.checkpoint.dcp.file_plan import plan_file
from deepvm.checkpoint.dcp.rank_region import Region, RegionSegment, filled
from deepvm.errors import CheckpointError

CHUNK = 65536


def shard(
    fqn: str,
    size: list[int],
    dtype: torch.dtype = torch.float32,
    *,
    offsets: list[int] | None = None,
    sizes: list[int] | None = None,
) -> WriteItem:
    at = torch.Size(offsets or [0] * len(size))
    chunk = ChunkStorageMetadata(at, torch.Size(sizes or size))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size))
    return WriteItem(MetadataIndex(fqn, at), WriteItemType.SHARD, tensor_data=data)


def test_each_rank_has_whole_chunks_and_wide_types_come_first_among_odd_sizes() -> None:
    plans = [
        SavePlan(
            [
                shard("odd", [3], torch.float16),
                shard("odd.wide", [5], torch.float64),
                shard("w", [64, 16], offsets=[0, 0], sizes=[32, 16]),
                shard("c", [2], torch.complex64),
            ]
        ),
        SavePlan([]),
        SavePlan([shard("w", [64, 16], offsets=[32, 0], sizes=[32, 16]), shard("b", [7], torch.bool)]),
    ]
    made = plan_file(plans, CHUNK, 100)
    assert [(e.name, e.dtype, e.shape, e.start - CHUNK, e.bytes) for e in made.layout.entries] == [
        ("w@0,0", "F32", (32, 16), 0, 2048),
        ("odd.wide", "F64", (5,), 2048, 40),
        ("c", "F32", (2, 2), 2088, 16),
        ("odd", "F16", (3,), 2104, 6),
        ("deepvm.pad.0", "U8", (CHUNK - 2110,), 2110, CHUNK - 2110),
        ("w@32,0", "F32", (32, 16), CHUNK, 2048),
        ("b", "BOOL", (7,), CHUNK + 2048, 7),
    ]
    assert (made.layout.header_bytes, made.layout.size_bytes) == (CHUNK, 2 * CHUNK + 2055)
    assert made.regions == [(CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + 2055)]
    assert made.offset(MetadataIndex("w", torch.Size([32, 0]))) == 2 * CHUNK
    assert made.offset(MetadataIndex("odd", torch.Size([0]))) == CHUNK + 2104


@pytest.mark.parametrize(
    "data",
    [["x" * CHUNK, None], [{"a": "x" * CHUNK}, {"b": 1}], [{"a": 1}, "x" * CHUNK]],
    ids=["text", "mappings", "both"],
)
def test_the_header_has_room_for_what_planners_add(data: list[Any]) -> None:
    plans = [SavePlan([shard(f"w{rank}", [4])], planner_data=each) for rank, each in enumerate(data)]
    assert plan_file(plans, CHUNK, 0).layout.header_bytes == 3 * CHUNK  # twice their text, and the shards' names
    assert plan_file(plans, CHUNK, CHUNK).layout.header_bytes == 4 * CHUNK


def test_what_the_format_cannot_hold_is_refused() -> None:
    plan = SavePlan([shard("w", [4])])
    with pytest.raises(CheckpointError, match="1 shards need a header of 100007936 bytes, the format holds 100 MB"):
        plan_file([plan], CHUNK, 100_000_000)
    with pytest.raises(CheckpointError, match=r"^w is saved twice, or starts with deepvm.pad"):
        plan_file([plan, plan], CHUNK, 0)
    with pytest.raises(CheckpointError, match=r"^deepvm.pad.0 is saved twice, or starts with deepvm.pad"):
        plan_file([SavePlan([shard("deepvm.pad.0", [4])])], CHUNK, 0)


def test_a_region_makes_a_tensor_for_its_first_chunk_and_frees_it_with_its_last_copy() -> None:
    data = torch.arange(250, dtype=torch.uint8)
    loads: list[int] = []

    def load() -> torch.Tensor:
        loads.append(len(loads))
        return data.clone()

    segments = [filled(450, 50), RegionSegment(200, 250, load), filled(450, 0)]
    region = Region(500, 100, segments, 2)
    whole = bytes(data.tolist()) + bytes(50)
    assert region.chunks == range(2, 5)
    for chunk in (2, 4):
        for copy in range(2):
            assert region.readable(chunk)
            assert b"".join(region.views(chunk)) == whole[(chunk - 2) * 100 : (chunk - 1) * 100]
            assert region.digest(chunk) == xxhash.xxh3_64_intdigest(whole[(chunk - 2) * 100 : (chunk - 1) * 100])
            assert region.hand_over(chunk, 30, lambda groups: sum(g.bytes for g in groups)) == 70
            assert region.readable(chunk), copy
            region.sent(chunk)
        assert not region.readable(chunk)
    assert loads == [0]
    region.sent(3)
    region.digest(3)
    region.sent(3)
    assert loads == [0]
    assert (b"".join(region.views(2)), loads) == (whole[:100], [0, 1])  # it was freed, and is made again
    assert Region(500, 100, [filled(0, 0)], 1).chunks == range(0)
