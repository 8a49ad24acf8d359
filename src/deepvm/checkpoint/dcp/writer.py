"""All ranks' shards -> one file in a store: the coordinator lays it out (``file_plan``), each rank sends its part
(``transports``), the coordinator commits. ``reader`` loads it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from deepvm.checkpoint.dcp.checkpoint_id import StepFromId
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
from deepvm.store.state_check import check_header
from deepvm.store.urls import open_store

OBJECT_BYTES = 2**20
_SESSION = secrets.token_hex(8)  # of this process: a newer coordinator of a run fences off the older one
_NODES_DOWN = MetadataIndex("deepvm.nodes_down")  # in the place of an item's result


class DeepvmWriter(StepFromId, StorageWriter):
    """Saves into memory nodes; from a single process also into file:// and object storage.

    One writer may serve many saves, each with ``checkpoint_id="step-N"``; unchanged chunks are then not sent again.
    ``object_bytes`` is the room for values that are not tensors: numbers, names, schedules.
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
        self._url, self._run, self._wanted_step = url, check_run(run), step
        self._token, self._key = token, key
        self._object_bytes, self._deadline_s = object_bytes, deadline_s
        self._plans: list[SavePlan] = []  # as last planned; planners that cache send changes only
        self._file: FilePlan | None = None  # the coordinator's
        self._base: Base | None = None
        self._transport: Transport | None = None  # the coordinator's, from its send to its commit
        self._stack = ExitStack()  # closes the transport's store
        self._coordinator = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del args
        self._coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise UsageError("a deepvm checkpoint is one file of all ranks: save it with use_collectives=True")
        if self._wanted_step is None:
            raise UsageError("a checkpoint needs a step: DeepvmWriter(step=100), or checkpoint_id='step-100'")

    # --- planning -------------------------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, step = self._complete(plans), self._wanted_step
        assert step is not None  # noqa: S101 - set_up_storage_writer comes first
        with closing(self._open()) as store:
            if (nodes := store.memory_nodes()) is not None:
                nodes.session = _SESSION
                with closing(MemoryTransfer(nodes, self._run)) as transfer:
                    chunk_bytes = transfer.prepare()
                    transfer.abort(step)  # what a failed save may have left
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
                step=step,
                rank=rank,
                world_size=len(plans),
                size_bytes=file.layout.size_bytes,
                chunk_bytes=chunk_bytes,
                fingerprint=file.layout.fingerprint,
                start=start,
                end=end,
                places={item.index: file.offset(item.index) for item, _ in tensor_items(plans[rank])},
            )
            for rank, (start, end) in enumerate(file.regions)
        ]
        return [replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

    def _complete(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return all ranks' plans; a planner that caches them sends only those that changed. Every rank gets its plan
        again: where its shards are in the file depends on those of others."""
        if any(not plan.usable for plan in plans):
            if len(plans) != len(self._plans):
                raise UsageError("this planner caches plans: use one DeepvmWriter for all saves, with checkpoint_id=")
            plans = [plan if plan.usable else old for plan, old in zip(plans, self._plans, strict=True)]
        self._plans = plans
        return plans

    def _open(self) -> Store:
        token, key = resolve_secrets(self._token, self._key)
        return open_store(self._url, token=token, key=key)

    # --- writing ----------------------------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        share = plan.storage_data
        if share.step != self._wanted_step:
            raise CheckpointError(
                f"rank {share.rank} saves step {self._wanted_step}, the coordinator step {share.step}: pass every rank "
                "the same one"
            )
        results = [_write_object(item, planner) for item in plan.items if item.type is WriteItemType.BYTE_IO]
        segments = []
        for item, data in tensor_items(plan):
            size_bytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize
            load = partial(_load_tensor, item, data, planner)
            segments.append(RegionSegment(share.places[item.index], size_bytes, load))
            results.append(WriteResult(item.index, size_bytes, None))
        end = max((s.start + s.length for s in segments), default=share.start)
        sent = self._send(share, [*segments, filled(end, share.end - end)])
        results.append(WriteResult(_NODES_DOWN, 0, sent.nodes_down))
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def _send(self, share: RankShare, segments: Sequence[RegionSegment]) -> TransferResult:
        base, self._base = self._base, None
        with ExitStack() as stack:
            store = stack.enter_context(closing(self._open()))
            transport = open_transport(store, self._run, share, self._deadline_s)
            try:
                sent = transport.send(segments, base if base and base.layout == share.fingerprint else None)
            except BaseException:
                transport.abort()
                raise
            if self._coordinator:
                self._transport, self._stack = transport, stack.pop_all()
        if sent.digests and not sent.nodes_down:
            self._base = Base(step=share.step, layout=share.fingerprint, digests=sent.digests)
        return sent

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        file, transport = self._file, self._transport
        assert file is not None and transport is not None  # noqa: S101, PT018 - the coordinator planned and sent
        written = [result for of_rank in results for result in of_rank]
        down = {node for r in written if r.index == _NODES_DOWN for node in r.storage_data}
        with self._stack:
            try:
                header = filled(0, self._header(file, metadata, written))
                transport.commit(header, {"torch": torch.__version__, "format": FORMAT}, down)
            except BaseException:
                transport.abort()
                raise

    def _header(self, file: FilePlan, metadata: Metadata, written: list[WriteResult]) -> bytes:
        objects = {r.index.fqn: r.storage_data for r in written if r.index.offset is None and r.index != _NODES_DOWN}
        described = encode(metadata, file.names, objects)
        header = file.layout.header(described)
        if header is None:
            raise CheckpointError(
                f"values that are not tensors and the shards' names take {len(described['dcp'])} bytes, the header has "
                f"{file.layout.header_bytes}: raise object_bytes from {self._object_bytes}, or save them as tensors"
            )
        check_header(header, file.layout.size_bytes)  # nobody could load it, and it would be committed for nothing
        return header


def _load_tensor(item: WriteItem, planned: TensorWriteData, planner: SavePlanner) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"the planner gives a {type(tensor).__name__} for tensor {item.index.fqn}")
    if tensor.dtype != planned.properties.dtype or tensor.shape != planned.chunk.sizes:
        raise CheckpointError(
            f"{item.index.fqn} was planned as {planned.properties.dtype} {list(planned.chunk.sizes)}, "
            f"and is {tensor.dtype} {list(tensor.shape)}"
        )
    return to_storable(tensor.detach())[0].to("cpu").contiguous()


def _write_object(item: WriteItem, planner: SavePlanner) -> WriteResult:
    """Encode a value that is not a tensor as JSON, for the header. DCP's planners would pickle it."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise CheckpointError(
            f"{type(planner).__name__} has no lookup_object, so {item.index.fqn} could only be pickled: "
            "derive it from DefaultSavePlanner"
        )
    document = encode_object(lookup(item.index), item.index.fqn)
    return WriteResult(item.index, 0, document)
