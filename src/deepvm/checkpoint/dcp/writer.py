"""The writer: the coordinator lays out one file, each rank sends its part of it, the coordinator commits."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from deepvm.checkpoint.dcp.checkpoint_id import step_of, tells_step
from deepvm.checkpoint.dcp.file_plan import FilePlan, RankShare, plan_file, tensor_items
from deepvm.checkpoint.dcp.metadata import FORMAT, encode, encode_object
from deepvm.checkpoint.dcp.rank_region import RegionSegment, filled
from deepvm.checkpoint.dcp.transports import Transport, open_transport
from deepvm.checkpoint.environment import resolve_secrets
from deepvm.checkpoint.save.memory_transfer import MemoryTransfer, TransferResult
from deepvm.checkpoint.save.sender_threads import Base
from deepvm.checkpoint.state.layout import to_storable
from deepvm.errors import CheckpointError, UsageError
from deepvm.store.base import DEFAULT_CHUNK_BYTES, Store, check_run
from deepvm.store.urls import open_store

OBJECT_BYTES = 2**20
_SESSION = secrets.token_hex(8)  # of this process: a newer one that coordinates saves of a run fences it off
_NODES_DOWN = MetadataIndex("deepvm.nodes_down")  # in the place of an item's result


class DeepvmWriter(StorageWriter):
    """Saves into memory nodes; from a single process also into file:// and object storage.

    One writer may serve many saves, each with ``checkpoint_id="step-N"``; then what did not change is not sent again.
    ``object_bytes`` is the room for what is no tensor: numbers, names, schedules.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        run: str,
        step: int | None = None,
        token: str | None = None,
        key: str | None = None,
        object_bytes: int = OBJECT_BYTES,
        deadline_s: float = 600.0,
    ) -> None:
        self._url, self._run, self._step = url, check_run(run), step
        self._token, self._key = token, key
        self._object_bytes, self._deadline_s = object_bytes, deadline_s
        self._plans: list[SavePlan] = []  # as last planned; planners that cache send changes only
        self._file: FilePlan | None = None  # the coordinator's
        self._base: Base | None = None
        self._way: Transport | None = None
        self._coordinator = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return tells_step(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del args
        self._coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise UsageError("a deepvm checkpoint is one file of all ranks: save it with use_collectives=True")
        if self._step is None:
            raise UsageError("a checkpoint needs a step: DeepvmWriter(step=100), or checkpoint_id='step-100'")

    # --- planning -------------------------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = self._whole(plans)
        with closing(self._open()) as store:
            if (nodes := store.memory_nodes()) is not None:
                nodes.session = _SESSION
                transfer = MemoryTransfer(nodes, self._run)
                try:
                    chunk_bytes = transfer.prepare()
                    transfer.abort(self._wanted_step())  # what a save that failed may have left of it
                finally:
                    transfer.close()
            elif len(plans) > 1:
                raise UsageError(
                    f"{len(plans)} ranks cannot write one file into {store.url}: save into memory://HOST:PORT, whose "
                    "node writes it on (deepvm memory-node --durable URL)"
                )
            else:
                chunk_bytes = DEFAULT_CHUNK_BYTES
        self._file = file = plan_file(plans, chunk_bytes, self._object_bytes)
        shares = [
            RankShare(
                session=_SESSION,
                step=self._wanted_step(),
                rank=rank,
                world_size=len(plans),
                size_bytes=file.layout.size_bytes,
                chunk_bytes=chunk_bytes,
                fingerprint=file.layout.fingerprint,
                start=start,
                end=end,
                places=file.places[rank],
            )
            for rank, (start, end) in enumerate(file.regions)
        ]
        return [replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

    def _whole(self, plans: list[SavePlan]) -> list[SavePlan]:
        """All ranks' plans, where a planner that caches them sent only those that changed. Every rank is given its
        plan anew: where its shards are in the file depends on those of others."""
        if any(not plan.usable for plan in plans):
            if len(plans) != len(self._plans):
                raise UsageError("this planner caches plans: use one DeepvmWriter for all saves, with checkpoint_id=")
            plans = [plan if plan.usable else old for plan, old in zip(plans, self._plans, strict=True)]
        self._plans = plans
        return plans

    def _wanted_step(self) -> int:
        assert self._step is not None  # noqa: S101 - set_up_storage_writer saw to it
        return self._step

    def _open(self) -> Store:
        token, key = resolve_secrets(self._token, self._key)
        return open_store(self._url, token=token, key=key)

    # --- writing ----------------------------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        share = plan.storage_data
        if share.step != self._step:
            raise CheckpointError(f"rank {share.rank} saves step {self._step}, the coordinator step {share.step}")
        results = [_write_object(item, planner) for item in plan.items if item.type is WriteItemType.BYTE_IO]
        segments = [
            RegionSegment(share.places[item.index], _bytes_of(item), _loading(item, planner))
            for item, _ in tensor_items(plan)
        ]
        end = max((s.start + s.length for s in segments), default=share.start)
        sent = self._send(share, [*segments, filled(end, share.end - end)])
        results += [WriteResult(item.index, _bytes_of(item), None) for item, _ in tensor_items(plan)]
        results.append(WriteResult(_NODES_DOWN, 0, sent.nodes_down))
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def _send(self, share: RankShare, segments: Sequence[RegionSegment]) -> TransferResult:
        base, self._base = self._base, None
        way = open_transport(self._open(), self._run, share, self._deadline_s)
        try:
            sent = way.send(segments, base if base and base.layout == share.fingerprint else None)
        except BaseException:
            way.abort()
            way.close()
            raise
        if sent.digests and not sent.nodes_down:
            self._base = Base(step=share.step, layout=share.fingerprint, digests=sent.digests)
        if self._coordinator:
            self._way = way  # until it commits
        else:
            way.close()
        return sent

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        file, (way, self._way) = self._file, (self._way, None)
        assert file is not None  # noqa: S101 - only the coordinator finishes, and it planned
        assert way is not None  # noqa: S101 - and wrote
        written = [result for of_rank in results for result in of_rank]
        down = {node for r in written if r.index == _NODES_DOWN for node in r.storage_data}
        try:
            header = filled(0, self._header(file, metadata, written))
            way.commit(header, file.layout, {"torch": torch.__version__, "format": FORMAT}, down)
        except BaseException:
            way.abort()
            raise
        finally:
            way.close()

    def _header(self, file: FilePlan, metadata: Metadata, written: list[WriteResult]) -> bytes:
        objects = {r.index.fqn: r.storage_data for r in written if r.index.offset is None and r.index != _NODES_DOWN}
        described = encode(metadata, file.names, objects)
        header = file.layout.header(described)
        if header is None:
            raise CheckpointError(
                f"what is no tensor takes, with the shards' names, {len(described['dcp'])} bytes; the header has "
                f"{file.layout.header_bytes}: raise object_bytes from {self._object_bytes}, or save it as tensors"
            )
        return header


def _bytes_of(item: WriteItem) -> int:
    assert item.tensor_data is not None  # noqa: S101 - asked of tensors only
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _loading(item: WriteItem, planner: SavePlanner) -> Any:
    def load() -> torch.Tensor:
        planned = item.tensor_data
        tensor = planner.resolve_data(item)
        assert planned is not None  # noqa: S101 - asked of tensors only
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"the planner gives a {type(tensor).__name__} for tensor {item.index.fqn}")
        if tensor.dtype != planned.properties.dtype or tensor.shape != planned.chunk.sizes:
            raise CheckpointError(
                f"{item.index.fqn} was planned as {planned.properties.dtype} {list(planned.chunk.sizes)}, "
                f"and is {tensor.dtype} {list(tensor.shape)}"
            )
        return to_storable(tensor.detach())[0].to("cpu").contiguous()

    return load


def _write_object(item: WriteItem, planner: SavePlanner) -> WriteResult:
    """A value that is no tensor, as JSON; it reaches the header with the results. DCP's planners would pickle it."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise CheckpointError(
            f"{type(planner).__name__} has no lookup_object, so {item.index.fqn} could only be pickled: "
            "derive it from DefaultSavePlanner"
        )
    document = encode_object(lookup(item.index), item.index.fqn)
    return WriteResult(item.index, 0, document)
