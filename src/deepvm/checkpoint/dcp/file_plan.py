"""All ranks' save plans -> the layout of one file and each rank's share of it, for ``writer``.

Each rank has a region that begins at a chunk's border, so that no two ranks have bytes in one chunk. The rest of a
region's last chunk is a tensor of zeros, ``deepvm.pad.RANK``: the format allows no gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from deepvm.checkpoint.state.layout import ALIGNED_BYTES, DTYPES, Entry, Layout, entries_text, spec_of, to_storable
from deepvm.errors import CheckpointError
from deepvm.store.safetensors import MOST_HEADER_BYTES

PAD = "deepvm.pad"
_DATA_START = 8  # of the header, without its length


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one rank sends. It reaches the rank with the plan that torch sends from the coordinator."""

    session: str
    step: int
    rank: int
    world_size: int
    size_bytes: int  # of the whole file
    chunk_bytes: int
    fingerprint: str
    start: int  # of the rank's region
    end: int
    places: dict[MetadataIndex, int]  # where its shards begin in the file


@dataclass(frozen=True)
class FilePlan:
    layout: Layout
    names: dict[MetadataIndex, str]
    regions: list[tuple[int, int]]  # of each rank

    def offset(self, index: MetadataIndex) -> int:
        """Return where a shard begins in the file."""
        return self.layout.entries[self.layout.by_name[self.names[index]]].start


def shard_name(index: MetadataIndex, data: TensorWriteData) -> str:
    """Return the name of a tensor that one rank has whole, or the name with the offsets of a shard."""
    if data.chunk.sizes == data.size:
        return index.fqn
    return f"{index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def tensor_items(plan: SavePlan) -> list[tuple[WriteItem, TensorWriteData]]:
    return [(item, item.tensor_data) for item in plan.items if item.tensor_data is not None]


def plan_file(plans: Sequence[SavePlan], chunk_bytes: int, object_bytes: int) -> FilePlan:
    """Lay out all ranks' shards. ``object_bytes`` stay free in the header for values that are not tensors: they are
    known only after they are written."""
    entries: list[Entry] = []  # relative to the end of the header, whose size is not known yet
    names: dict[MetadataIndex, str] = {}
    regions: list[tuple[int, int]] = []
    at = 0
    for rank, plan in enumerate(plans):
        if at % chunk_bytes:
            pad_bytes = -at % chunk_bytes
            entries.append(Entry(f"{PAD}.{rank - 1}", "U8", (pad_bytes,), at, pad_bytes))
            at += pad_bytes
            regions[-1] = (regions[-1][0], at)
        start = at
        for entry in _rank_entries(plan, names):
            entries.append(replace(entry, start=at))
            at += entry.bytes
        regions.append((start, at))
    room = 3 * len(entries_text(entries, 0)) + 2 * len(repr(_merged(plans))) + object_bytes
    header_bytes = -(-(_DATA_START + room) // chunk_bytes) * chunk_bytes
    if header_bytes > MOST_HEADER_BYTES:
        raise CheckpointError(f"{len(entries)} shards need a header of {header_bytes} bytes, the format holds 100 MB")
    layout = Layout(
        entries=tuple(replace(e, start=e.start + header_bytes) for e in entries),
        header_bytes=header_bytes,
        size_bytes=header_bytes + at,
    )
    return FilePlan(layout, names, [(start + header_bytes, end + header_bytes) for start, end in regions])


def _rank_entries(plan: SavePlan, names: dict[MetadataIndex, str]) -> list[Entry]:
    """Order one rank's shards: sizes that are not a multiple of 64 last, wide types first, so that each is aligned."""
    found = []
    for item, data in tensor_items(plan):
        plain, _ = to_storable(torch.empty(data.chunk.sizes, dtype=data.properties.dtype, device="meta"))
        name, dtype, shape = spec_of(shard_name(item.index, data), plain)
        if item.index in names or name.startswith(PAD):
            raise CheckpointError(f"{name} is saved twice, or starts with {PAD}: use a planner that removes duplicates")
        names[item.index] = name
        found.append(Entry(name, dtype, shape, 0, plain.numel() * plain.element_size()))
    return sorted(found, key=lambda entry: (entry.bytes % ALIGNED_BYTES != 0, -DTYPES[entry.dtype].itemsize))


def _merged(plans: Sequence[SavePlan]) -> Any:
    """Join the planners' own data; the default planner's is the same mapping on most ranks."""
    data = [plan.planner_data for plan in plans if plan.planner_data is not None]
    if all(isinstance(part, dict) for part in data):
        return {key: value for part in data for key, value in part.items()}
    return data
