"""One consistent picture of the state, taken while training continues.

A tensor's bytes come from one of two sources:

- **in place**: memory that only an optimizer's step changes, and whose pages are protected. Its bytes are read where
  they are, by the kernel, since another thread may free them; before the optimizer steps (``freeze``, in its pre-hook)
  what was not yet sent is copied into staging memory, and the pages are unprotected.
- **staged**: all else. It is copied when the snapshot is taken; what is on a GPU arrives later (see device.py).

Every chunk is proven: after its bytes were read, and before it counts as sent, the kernel is asked whether one of its
pages was written since the snapshot was taken. If one was, the snapshot is torn; the save fails and is never committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import xxhash

from deepvm.checkpoint.buffers.guarded_copy import GuardedCopy, MemoryGone
from deepvm.checkpoint.buffers.staging import Staging, copy_bytes, thread_buffer
from deepvm.checkpoint.snapshot.device import Arrivals
from deepvm.checkpoint.snapshot.live_tensors import LiveTensors
from deepvm.checkpoint.state.layout import DTYPES, Layout
from deepvm.errors import CheckpointError
from deepvm.protocol.sockets import HASHED_BYTES
from deepvm.store.memory.buffers import BufferGroup, from_offset, views_of
from deepvm.store.memory.connection import Send

_CHANGED = "a tensor was changed in place before it was saved, other than by the optimizer's step"
GATE_S = 600.0  # no copy takes longer; a sender that waits longer has lost its trainer


class Snapshot:
    """``live`` tensors have begun: what is not in place is staged."""

    def __init__(self, live: LiveTensors, copies: Sequence[int], arrivals: Arrivals | None = None) -> None:
        self.chunk_map, self.staging, self._live = live.chunk_map, live.staging, live
        self._arrivals = arrivals
        self._in_place = live.in_place
        self._moved = bytearray(self.chunk_map.count)  # what was in place is in staging memory now
        self._waiting = bytearray(copies)  # how many nodes still have to get the chunk from this rank
        self._ending = threading.Lock()
        self.frozen = False  # nothing is protected any more
        self.torn: str | None = None

    @property
    def bytes_in_place(self) -> int:
        """The bytes that were not copied when the snapshot was taken."""
        return self._in_place.bytes

    # --- the trainer's side -------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Copy what is in place and not yet sent. After it, tensors may change."""
        with self._ending:
            if not self.frozen:
                self._freeze()

    def _freeze(self) -> None:
        if self._arrivals is not None:
            self._arrivals.hold()  # on the GPU; nothing waits here
        self._live.gate.clear()  # senders pause
        locks = self._live.locks
        held = [lock for lock, waiting in zip(locks, self._waiting, strict=True) if waiting and lock.acquire()]
        try:
            unsent = [c for c, n in enumerate(self._waiting) if n and self._in_place.in_chunk[c]]
            if unsent and self.torn is None:
                try:
                    self._live.copy_chunks(unsent)
                except Exception as error:  # training continues without this save
                    self.torn = f"the state could not be copied: {error}"
                self._prove(unsent)  # after the copy: it must not have been written until then
            self._check_device()
            if self.torn is None:
                for chunk in unsent:
                    self._moved[chunk] = 1
            self.frozen = True
            self._live.unprotect()
        finally:
            for lock in held:
                lock.release()
            self._live.gate.set()

    def _prove(self, chunks: Sequence[int]) -> None:
        """Prove that nothing which these chunks have in place was written since the snapshot was taken. Only before
        ``frozen``, and after the bytes were read."""
        if not all(map(self._live.untouched, chunks)):
            self.torn = self.torn or _CHANGED

    def _check_device(self) -> None:
        if not self.frozen and self._arrivals is not None and self._arrivals.changed():
            self.torn = self.torn or _CHANGED

    def raise_if_torn(self) -> None:
        """Raise if the snapshot is torn: checked when all chunks are sent and proven, and right before the commit."""
        self._check_device()
        if self.torn is not None:
            raise CheckpointError(self.torn)

    def end(self) -> None:
        """End the save, whatever its outcome: nothing is read any more, so nothing needs protection."""
        with self._ending:
            if not self.frozen:
                self.frozen = True
                self._live.unprotect()

    def mend(self) -> None:
        """Prepare memory for the next save, between saves."""
        self._live.mend()

    # --- the senders' side --------------------------------------------------------------------------------------

    def wait(self, chunk: int) -> None:
        """Wait until what comes from a GPU has arrived, and while the trainer copies."""
        if self._arrivals is not None:
            offset, length = self.chunk_map.span(chunk)
            self._arrivals.wait(offset, offset + length)
        self._live.gate.wait(GATE_S)

    def digest(self, chunk: int) -> int:
        self.wait(chunk)
        with self._live.locks[chunk]:
            hasher = xxhash.xxh3_64()
            for view in views_of(self._groups(chunk)):
                hasher.update(view)
            self._prove_read(chunk)
            return hasher.intdigest()

    def hand_over(self, chunk: int, offset: int, send: Send) -> int:
        """Call ``send`` with the memory of a chunk from an offset on, group by group: of what is in place, a group is
        a copy that is valid until the next one is asked for. A plain read would end the process if a tensor's memory
        was freed meanwhile."""
        self.wait(chunk)
        with self._live.locks[chunk]:
            return send(self._groups(chunk, offset))

    def whole(self, chunk: int, use: Callable[[Sequence[memoryview]], None]) -> None:
        """Call ``use`` with all memory of a chunk."""
        self.wait(chunk)
        with self._live.locks[chunk]:
            if self._read_in_place(chunk):
                buffer, at = thread_buffer(self.chunk_map.chunk_bytes), 0
                for copy in self._in_place.live(chunk):
                    self._read(copy, buffer.address + at)
                    at += copy.bytes
                use([buffer.view[:at]])
            else:
                use(list(views_of(self._groups(chunk))))

    def sent(self, chunk: int) -> None:
        """Count the chunk as sent to one node, if what was read of it is the state of the save. Raises if not: then its
        digest has not left this process, and no node accepts it without."""
        with self._live.locks[chunk]:
            self._prove_read(chunk)
            self._waiting[chunk] -= 1

    def readable(self, chunk: int) -> bool:
        """True if the chunk's bytes are still those of the snapshot."""
        return not self.frozen or bool(self._moved[chunk]) or not self._in_place.in_chunk[chunk]

    def _prove_read(self, chunk: int) -> None:
        """The caller holds the chunk's lock, under which ``freeze`` moves and proves a chunk that is not sent."""
        if self._in_place.in_chunk[chunk] and not self._moved[chunk]:
            if not self.frozen:
                self._prove([chunk])
            if self.torn is not None:
                raise CheckpointError(self.torn)

    def _groups(self, chunk: int, offset: int = 0) -> Iterable[BufferGroup]:
        """Return the memory of a chunk from an offset on. The caller holds the chunk's lock."""
        return (
            self._copied(chunk, offset)
            if self._read_in_place(chunk)
            else from_offset(self._in_place.staged(chunk), offset)
        )

    def _read_in_place(self, chunk: int) -> bool:
        if not self.readable(chunk):
            raise CheckpointError(self.torn or f"chunk {chunk} was released to the optimizer and cannot be read again")
        return bool(self._in_place.in_chunk[chunk]) and not self._moved[chunk]

    def _copied(self, chunk: int, offset: int) -> Iterator[BufferGroup]:
        for copy in self._in_place.live(chunk):
            if offset < copy.bytes:
                buffer = thread_buffer(HASHED_BYTES)
                self._read(copy, buffer.address)
                yield BufferGroup(copy.bytes - offset, [buffer.view[offset : copy.bytes]])
            offset = max(0, offset - copy.bytes)

    def _read(self, copy: GuardedCopy, to: int) -> None:
        try:
            copy.into(to)
        except MemoryGone as error:
            self.torn = self.torn or str(error)
            raise


def stage(staging: Staging, layout: Layout, entry: int, tensor: torch.Tensor) -> None:
    """Copy a tensor to its place in staging memory, whatever its strides and device."""
    where = layout.entries[entry]
    if not where.bytes:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        copy_bytes(staging.address + where.start, tensor.data_ptr(), where.bytes)
    else:
        staging.tensor(where.start, DTYPES[where.dtype], where.shape).copy_(tensor)
