"""One consistent picture of the state, taken while training goes on.

A tensor's bytes come from one of three sources:

- **live**: it changes only in an optimizer's step. Its bytes are read where they are; before the optimizer steps
  (``freeze``, called by its own pre-hook) what was not yet sent is copied into staging memory.
- **stable**: a frozen parameter that did not change since the last save. Its copy of then is still in staging memory.
- **staged**: anything else. It is copied when the snapshot is taken; what is on a GPU arrives later (see device.py).

Live tensors are watched by torch's version counters, stable ones are compared with their copies: a snapshot of which a
tensor changed before it was read is torn, says so, and is never committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import xxhash

from deepvm.checkpoint.device import Arrivals
from deepvm.checkpoint.layout import DTYPES, Layout
from deepvm.checkpoint.sources import Sources, versions_of
from deepvm.checkpoint.staging import Staging, copy_bytes, same_bytes
from deepvm.errors import CheckpointError
from deepvm.store.connection import Send
from deepvm.store.strips import Strip, from_offset, views_of

_NEXT = "from the next save on it is copied every time"
GATE_S = 600.0  # no copy takes so long; a sender that waits longer has lost its trainer


class Snapshot:
    """``stable`` are tensors by entry, as they were when they were staged; what is not live was staged before."""

    def __init__(
        self,
        sources: Sources,
        stable: Mapping[int, torch.Tensor],
        copies: Sequence[int],
        arrivals: Arrivals | None = None,
    ) -> None:
        self.pieces, self.staging, self._sources = sources.pieces, sources.staging, sources
        self._stable, self._arrivals = stable, arrivals
        sources.mark()
        self._stable_versions = {entry: versions_of(tensor) for entry, tensor in stable.items()}
        self._moved = bytearray(self.pieces.count)  # live parts are in staging memory now
        self._waiting = bytearray(copies)  # how many nodes still have to get the chunk from this rank
        self.frozen = False
        self.torn: str | None = None
        self.unseen: set[str] = set()  # stable tensors that changed though torch's counters say they did not

    # --- the trainer's side -------------------------------------------------------------------------------------

    def freeze(self) -> int:
        """Copy what is live and not yet sent; returns the bytes copied. After it, tensors may change."""
        if self.frozen:
            return 0
        if self._arrivals is not None:
            self._arrivals.hold()  # on the GPU; nothing waits here
        self._sources.gate.clear()  # senders stand still
        locks = self._sources.locks
        held = [lock for lock, waiting in zip(locks, self._waiting, strict=True) if waiting and lock.acquire()]
        try:
            copied = 0
            unsent = [c for c, n in enumerate(self._waiting) if n and self._sources.in_chunk[c] and not self._moved[c]]
            self.check_untorn()  # what is sent already, too: after this, nobody can tell
            if unsent:
                copied = self._copy(unsent)
                for chunk in unsent:
                    self._moved[chunk] = 1
            self.frozen = True
            return copied
        finally:
            for lock in held:
                lock.release()
            self._sources.gate.set()

    def _copy(self, unsent: Sequence[int]) -> int:
        everything = len(unsent) >= 0.9 * sum(self._sources.in_chunk)
        try:
            return self._sources.copy_everything() if everything else self._sources.copy_chunks(unsent)
        except Exception as error:  # training goes on without this save
            self.torn = f"the state could not be copied: {error}"
            return 0

    def check_untorn(self) -> None:
        """That no tensor which is read where it is has changed since the snapshot was taken."""
        if self.frozen or self.torn is not None:
            return
        on_device = self._arrivals is not None and self._arrivals.changed()
        if on_device or self._sources.changed():
            self.torn = "a tensor was changed in place before it was saved, other than by the optimizer's step"

    def raise_if_torn(self) -> None:
        """Asked twice, also right before the commit: torch counts a change when it is finished, not when it begins."""
        self.check_untorn()
        if self.torn is not None:
            raise CheckpointError(self.torn)

    # --- the senders' side --------------------------------------------------------------------------------------

    def ready(self, chunk: int) -> None:
        """Wait until what comes from a GPU has arrived."""
        if self._arrivals is not None:
            offset, length = self.pieces.span(chunk)
            self._arrivals.wait(offset, offset + length)

    def digest(self, chunk: int) -> int:
        self.ready(chunk)
        self._sources.gate.wait(GATE_S)
        with self._sources.locks[chunk]:
            self._compare_stable(chunk)
            hasher = xxhash.xxh3_64()
            for view in views_of(self._strips(chunk)):
                hasher.update(view)
            return hasher.intdigest()

    def hand_over(self, chunk: int, offset: int, send: Send) -> int:
        """Call ``send`` with the memory of a chunk from an offset on, while nothing moves or changes it."""
        self.ready(chunk)
        self._sources.gate.wait(GATE_S)
        with self._sources.locks[chunk]:
            if not offset:
                self._compare_stable(chunk)
            return send(from_offset(self._strips(chunk), offset))

    def sent(self, chunk: int) -> None:
        with self._sources.locks[chunk]:
            self._waiting[chunk] -= 1

    def readable(self, chunk: int) -> bool:
        """Whether the chunk's bytes are still those of the snapshot."""
        return not self.frozen or bool(self._moved[chunk]) or not self._sources.in_chunk[chunk]

    def _compare_stable(self, chunk: int) -> None:
        """Find what changed before the save behind the version counters. What changed since in their sight may have
        changed before as well, and nobody can tell: such a parameter is not frozen enough to be read so."""
        for entry, offset, length in self.pieces.parts[chunk] if self._stable else ():
            tensor = self._stable.get(entry)
            if tensor is None:
                continue
            where = self.pieces.layout.entries[entry]
            same = same_bytes(self.staging.address + offset, tensor.data_ptr() + offset - where.start, length)
            if not same:
                hidden = versions_of(tensor) == self._stable_versions[entry]
                how = "behind torch's back (through .data?)" if hidden else "in place before it was saved"
                self.unseen.add(where.name)
                self.torn = f"{where.name} is frozen and was changed {how}: {_NEXT}"

    def _strips(self, chunk: int) -> list[Strip]:
        if not self.readable(chunk):
            raise CheckpointError(f"chunk {chunk} was given up to the optimizer and cannot be read again")
        return self._sources.strips(chunk, moved=bool(self._moved[chunk]))


def stage(staging: Staging, layout: Layout, entry: int, tensor: torch.Tensor) -> None:
    """Copy a tensor to its place in staging memory, whatever its strides and device."""
    where = layout.entries[entry]
    if not where.bytes:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        copy_bytes(staging.address + where.start, tensor.data_ptr(), where.bytes)
    else:
        staging.tensor(where.start, DTYPES[where.dtype], where.shape).copy_(tensor)
