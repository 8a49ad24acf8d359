"""An upload: chunks of several ranks and connections in, the blocks of a committed checkpoint out.

An upload owns references to blocks and a reservation for those still to come. Nothing of it is visible to readers.
A block that is being received belongs to the connection that receives it, until it is whole and verified.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepvm.errors import StoreError
from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.storage import rank_states
from deepvm.memnode.storage.arena import Arena, ArenaFull
from deepvm.memnode.storage.budgets import KeptDocuments
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.protocol.placement import Share
from deepvm.store.base import Manifest, chunk_count, chunk_span
from deepvm.units import format_bytes

MOST_FACTS_BYTES = 4 * 2**20  # of a manifest, beside its chunks' digests
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """The fields of BEGIN, with which a rank begins or joins an upload."""

    step: int
    size_bytes: int
    layout: str
    rank: int
    world_size: int
    share: Share
    attempt: int = 0  # a later one of the same step begins from nothing
    repair: bool = False  # of a checkpoint that other nodes have: saves go first
    partial_reservation: bool = False  # the node has many of its chunks: it may begin without room for all


def too_large(begin: Begin, arena: Arena) -> RequestRefused:
    needed, capacity = format_bytes(begin.size_bytes), format_bytes(arena.capacity_bytes)
    message = f"step {begin.step} needs {needed}, and the node has {capacity} in all: start it with a larger --capacity"
    return RequestRefused("no-room", message)


class Upload:
    def __init__(
        self, arena: Arena, begin: Begin, kept: KeptDocuments, *, session: str, reserved: int, room_s: float
    ) -> None:
        self.arena, self.begin, self.session = arena, begin, session
        self.chunks = chunk_count(begin.size_bytes, arena.block_bytes)
        self.blocks: dict[int, int] = {}
        self.digests: dict[int, int] = {}
        self.touched_s = time.monotonic()
        self.receiving = 0  # blocks that connections are filling
        self.taken = 0  # blocks that were filled for it, and not shared
        self._reserved, self._room_s = reserved, room_s if begin.partial_reservation else 0.0
        self._expected = begin.share.count(self.chunks)
        self._extras = rank_states.RankStates(kept)
        self._changed = threading.Condition()
        self._ended: RequestRefused | None = None

    # --- joining --------------------------------------------------------------------------------------------------

    def join(self, begin: Begin) -> None:
        mine = self.begin
        for what, wanted, found in (
            ("bytes", mine.size_bytes, begin.size_bytes),
            ("layout", mine.layout, begin.layout),
            ("world size", mine.world_size, begin.world_size),
            ("share of the chunks", mine.share, begin.share),
            ("attempt", mine.attempt, begin.attempt),
        ):
            if wanted != found:
                raise RequestRefused(
                    "failed",
                    f"step {begin.step}: rank {begin.rank} and rank {mine.rank} disagree on the {what} "
                    f"({_short(found)} and {_short(wanted)})",
                )
        self.touched_s = time.monotonic()

    # --- chunks ---------------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Take a block to receive a chunk into; ``finish`` or ``cancel`` ends this."""
        ends = time.monotonic() + self._room_s
        while True:
            with self._changed:
                self._check()
                try:
                    block = self._take()
                except ArenaFull:
                    if time.monotonic() >= ends:
                        raise self._without_room() from None
                else:
                    self.receiving += 1
                    return block
            self.arena.await_free(ends - time.monotonic())

    def finish(self, chunk: int, block: int, digest: int) -> None:
        """Attach a block that is whole and verified, in place of an earlier one."""
        with self._changed:
            self.receiving -= 1
            self._adopt(chunk, block, digest)

    def cancel(self, block: int) -> None:
        """Give back a block that was received damaged or in part."""
        with self._changed:
            self.receiving -= 1
            self._give_back(block)

    def keep(self, checkpoint: Checkpoint, chunks: Sequence[int], digests: Sequence[int]) -> None:
        """Share the blocks of an earlier checkpoint: all of these chunks, or none. Those on disk only are read back."""
        self._check_count(chunks)
        kept = checkpoint.manifest.digests
        wrong = sum(
            not (chunk < min(self.chunks, len(kept)) and kept[chunk] == digest and checkpoint.has(chunk))
            or checkpoint.manifest.span(chunk)[1] != self.length(chunk)
            for chunk, digest in zip(chunks, digests, strict=True)
        )
        found: dict[int, int] = {}
        read: list[int] = []
        try:
            for chunk in set(chunks) if not wrong else ():
                block = checkpoint.hold(chunk)
                if block is None:
                    block = self.start()
                    read.append(block)
                    checkpoint.read(chunk, block)
                found[chunk] = block
        except (StoreError, RequestRefused):
            wrong = 1
        with self._changed:
            self.receiving -= len(read)
            if wrong or self._ended is not None:
                for block in {*found.values(), *read}:
                    self._give_back(block) if block in read else self.arena.drop(block)
                self._check()
                message = f"{wrong} of {len(chunks)} chunks are not kept of step {checkpoint.step}"
                raise RequestRefused("not-found", message)
            for chunk, block in found.items():
                self._attach(chunk, block, kept[chunk])
            self._free_room()
            self.touched_s = time.monotonic()
            self._changed.notify_all()

    def share(self, chunk: int, block: int, digest: int) -> None:
        """Attach a block of another checkpoint; the caller's reference to it becomes the upload's."""
        with self._changed:
            self._adopt(chunk, block, digest)
            self._free_room()

    def _adopt(self, chunk: int, block: int, digest: int) -> None:
        if self._ended is not None:
            self.arena.drop(block)
        self._check()
        self._attach(chunk, block, digest)
        self._changed.notify_all()

    def _free_room(self) -> None:
        """Give back the reservation for chunks that are shared."""
        still_to_come = max(0, self._expected - len(self.blocks) - self.receiving)
        if self._reserved > still_to_come:
            self.arena.unreserve(self._reserved - still_to_come)
            self._reserved = still_to_come

    def length(self, chunk: int) -> int:
        if not 0 <= chunk < self.chunks:
            raise RequestRefused("failed", f"step {self.begin.step} has {self.chunks} chunks, but not chunk {chunk}")
        return chunk_span(chunk, self.begin.size_bytes, self.arena.block_bytes)[1]

    def check_manifest_length(self, length: int) -> None:
        """Check a manifest before it is parsed: it has 16 digits for each chunk, and facts."""
        most = 16 * self.chunks + MOST_FACTS_BYTES
        if length > most:
            raise RequestRefused(
                "failed", f"the manifest of step {self.begin.step} has {length} bytes, at most {most} are allowed"
            )

    def _check_count(self, chunks: Sequence[int]) -> None:
        if len(chunks) > self.chunks:
            raise RequestRefused("failed", f"step {self.begin.step} has {self.chunks} chunks, {len(chunks)} were named")

    def _take(self) -> int:
        block = self.arena.take(reserved=self._reserved > 0)
        self._reserved = max(0, self._reserved - 1)
        self.taken += 1
        return block

    def _without_room(self) -> RequestRefused:
        if self.chunks > self.arena.blocks:
            return too_large(self.begin, self.arena)
        if self.begin.partial_reservation:
            size, capacity = format_bytes(self.begin.size_bytes), format_bytes(self.arena.capacity_bytes)
            return RequestRefused(
                "no-room",
                f"step {self.begin.step} needs {size}, and the node, of {capacity}, has no room left for what changed: "
                "give it a larger --capacity, or keep fewer checkpoints (--buffers)",
            )
        return RequestRefused("busy", "no block is free for a chunk that is sent a second time: try again")

    def _give_back(self, block: int) -> None:
        if self._ended is None:
            self._reserved += self.arena.drop(block, reserve=True)
        else:
            self.arena.drop(block)

    def _attach(self, chunk: int, block: int, digest: int) -> None:
        before = self.blocks.get(chunk)
        self.blocks[chunk], self.digests[chunk] = block, digest
        if before is not None:
            self._give_back(before)

    # --- all ranks -----------------------------------------------------------------------------------------------

    def add_extra(self, rank: int, document: bytes) -> None:
        if rank >= self.begin.world_size:
            raise RequestRefused("failed", f"rank {rank} is out of range for world_size {self.begin.world_size}")
        rank_states.check(rank, document)
        with self._changed:
            self._check()
            self._extras.add(rank, document)
            self._changed.notify_all()

    def extras(self, world_size: int, timeout_s: float, is_gone: Callable[[], bool]) -> bytes:
        def missing() -> int:
            return world_size - len(self._extras)

        with self._changed:
            if world_size != self.begin.world_size:
                raise RequestRefused(
                    "failed", f"world_size is {world_size}, the upload began with {self.begin.world_size}"
                )
            if not self._wait(lambda: missing() <= 0, timeout_s, is_gone):
                raise RequestRefused(
                    "busy", f"step {self.begin.step}: the states of {missing()} of {world_size} ranks are missing"
                )
            return self._extras.as_list()

    def seal(self, chunks: Sequence[int], timeout_s: float, is_gone: Callable[[], bool]) -> list[int]:
        self._check_count(chunks)
        missing = list(chunks)

        def whole() -> bool:
            nonlocal missing
            missing = [chunk for chunk in missing if chunk not in self.blocks]
            return not missing

        self.length(max(chunks, default=0))
        with self._changed:
            if not self._wait(whole, timeout_s, is_gone):
                raise RequestRefused(
                    "busy", f"step {self.begin.step}: {len(missing)} of {len(chunks)} chunks are missing"
                )
            return [self.digests[chunk] for chunk in chunks]

    def _wait(self, ready: Callable[[], bool], timeout_s: float, is_gone: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            self._check()
            if ready():
                return True
            left = deadline - time.monotonic()
            if left <= 0 or is_gone():
                return False
            self._changed.wait(min(left, _LOOK_S))

    # --- the end --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._ended is not None:  # several threads may raise it: each has an exception of its own
            raise RequestRefused(self._ended.code, self._ended.message)
        self.touched_s = time.monotonic()

    def hand_over(self, manifest: Manifest, share: Share) -> dict[int, int]:
        """Return the blocks, for the checkpoint that this upload becomes, if they are what the manifest lists."""
        with self._changed:
            self._check()
            mine = share.chunks(self.chunks)
            missing = [chunk for chunk in mine if chunk not in self.blocks]
            if missing:
                raise RequestRefused(
                    "failed", f"step {self.begin.step}: {len(missing)} chunks are missing, first {missing[0]}"
                )
            wrong = [chunk for chunk in mine if self.digests[chunk] != manifest.digests[chunk]]
            if wrong:
                raise RequestRefused(
                    "corrupt", f"step {self.begin.step}: {len(wrong)} chunks are not what the manifest lists, "
                    f"first {wrong[0]}"
                )  # fmt: skip
            self.arena.index((block, (self.digests[chunk], self.length(chunk))) for chunk, block in self.blocks.items())
            blocks, self.blocks = self.blocks, {}
            self._end(RequestRefused("not-found", f"step {self.begin.step} is published, its upload is over"))
            return blocks

    def end(self, why: RequestRefused) -> None:
        """Give everything back. Connections that still receive or wait are refused for this reason."""
        with self._changed:
            if self._ended is None:
                self._end(why)

    def _end(self, why: RequestRefused) -> None:
        self._ended = why
        for block in self.blocks.values():
            self.arena.drop(block)
        self.blocks = {}
        self._extras.clear()
        self.arena.unreserve(self._reserved)
        self._reserved = 0
        self._changed.notify_all()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
