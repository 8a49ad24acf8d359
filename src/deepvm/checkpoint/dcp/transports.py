"""One rank's bytes -> a store: memory nodes, which all ranks reach; or any store, from one process. For ``writer``."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, TypeAlias

from deepvm.checkpoint.dcp.file_plan import RankShare
from deepvm.checkpoint.dcp.rank_region import Region, RegionSegment
from deepvm.checkpoint.save.memory_transfer import MemoryTransfer, TransferResult
from deepvm.checkpoint.save.sender_threads import Base, Upload
from deepvm.errors import StoreError
from deepvm.store.base import Manifest, Store
from deepvm.store.memory.store import MemoryStore


class NodeTransport:
    def __init__(self, store: MemoryStore, run: str, share: RankShare, deadline_s: float) -> None:
        self._store, self._run, self._share, self._deadline_s = store, run, share, deadline_s

    def send(self, segments: Sequence[RegionSegment], base: Base | None) -> TransferResult:
        """Send this rank's region. Nothing becomes visible."""
        with self._transfer() as transfer:
            ends = time.monotonic() + self._deadline_s
            return self._send(transfer, segments, base, ends, offering=base is None)[1]

    def commit(self, header: RegionSegment, facts: Mapping[str, Any], down: Collection[str]) -> None:
        """Send the header, wait until all ranks' bytes have arrived, and publish the checkpoint."""
        ends = time.monotonic() + self._deadline_s
        with self._transfer() as transfer:
            upload, sent = self._send(transfer, [header], None, ends, offering=False)
            transfer.commit(upload, facts, sorted({*down, *sent.nodes_down}), ends)

    def abort(self) -> None:
        """Leave nothing behind. Never raises."""
        with suppress(StoreError), self._transfer() as transfer:
            transfer.prepare()  # connects
            transfer.abort(self._share.step)

    def _send(
        self,
        transfer: MemoryTransfer,
        segments: Sequence[RegionSegment],
        base: Base | None,
        ends: float,
        *,
        offering: bool,
    ) -> tuple[Upload, TransferResult]:
        share = self._share
        region = Region(share.size_bytes, share.chunk_bytes, segments, self._store.replicas)
        upload = Upload(
            source=region, step=share.step, size_bytes=share.size_bytes, chunk_bytes=share.chunk_bytes,
            layout=share.fingerprint, base=base, offering=offering,
        )  # fmt: skip
        return upload, transfer.send(upload, region.chunks, ends)

    def _transfer(self) -> closing[MemoryTransfer]:
        return closing(MemoryTransfer(self._store, self._run, self._share.rank, self._share.world_size))


class StoreTransport:
    """The same methods, for one process and any store."""

    def __init__(self, store: Store, run: str, share: RankShare) -> None:
        self._run, self._share = run, share
        self._digests: dict[int, int] = {}
        self._writer = store.writer(run, share.step, size_bytes=share.size_bytes, chunk_bytes=share.chunk_bytes)

    def send(self, segments: Sequence[RegionSegment], base: Base | None) -> TransferResult:
        del base
        region = Region(self._share.size_bytes, self._share.chunk_bytes, segments, 1)
        for chunk in region.chunks:
            self._digests[chunk] = digest = region.digest(chunk)
            self._writer.put(chunk, region.views(chunk), digest)
            region.sent(chunk)
        return TransferResult(digests=[])

    def commit(self, header: RegionSegment, facts: Mapping[str, Any], down: Collection[str]) -> None:
        del down
        self.send([header], None)
        manifest = Manifest(
            run=self._run,
            step=self._share.step,
            size_bytes=self._share.size_bytes,
            chunk_bytes=self._share.chunk_bytes,
            digests=[digest for _, digest in sorted(self._digests.items())],
            created_s=time.time(),
            facts=facts,
        )
        self._writer.publish(manifest)

    def abort(self) -> None:
        self._writer.abort()


Transport: TypeAlias = NodeTransport | StoreTransport


def open_transport(store: Store, run: str, share: RankShare, deadline_s: float) -> Transport:
    nodes = store.memory_nodes()
    if nodes is None:
        return StoreTransport(store, run, share)
    nodes.session = share.session
    return NodeTransport(nodes, run, share, deadline_s)
