"""The tensors of a checkpoint as views of the memory that holds them, or will. load.py gives them to components."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from deepvm.checkpoint.buffers.staging import Staging, copy_bytes
from deepvm.checkpoint.restore.chunk_reader import Part
from deepvm.checkpoint.state.chunk_map import HEADER
from deepvm.checkpoint.state.layout import ALIGNED_BYTES, DTYPES, Entry, Layout

Piece = tuple[int, int, int]  # of a chunk: entry, offset in the file, length
_NO_HOMES: Mapping[int, Sequence[int]] = {}
LASTING_BYTES = 64 * 1024  # what is smaller is copied in less time than it takes to give it memory of its own


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether it lies as torch lays its own tensors, so that it can be computed with as fast as with those."""
    return tensor.data_ptr() % ALIGNED_BYTES == 0


class TensorViews(Mapping[str, torch.Tensor]):
    """Every tensor of a checkpoint, made when it is asked for. Most lie as in the file. Those of odd sizes would
    lie unaligned there, and be copied once more before anything can keep them: where memory is the restore's own, each
    has an aligned place."""

    def __init__(self, memory: Staging, layout: Layout) -> None:
        self.memory, self._layout = memory, layout
        self._made: dict[str, torch.Tensor] = {}
        self._apart, self._odd = _aligned_places(layout) if memory.own else (None, {})

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._made_by(Staging.tensor, name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._entry(name).dtype]

    def owning(self, name: str) -> torch.Tensor:
        """One for whoever keeps it when the others go."""
        return self._made_by(Staging.lasting_tensor, name)

    def address(self, entry: int) -> int:
        """Where an entry's bytes belong."""
        memory, start = self._place(entry)
        return memory.address + start

    def places(self, pieces: Sequence[Piece], homes: Mapping[int, Sequence[int]] = _NO_HOMES) -> list[Part]:
        """Where the pieces of a chunk go: to the ``homes`` of an entry, which are addresses, or to its place here, of
        which the memory is there then."""
        parts: list[Part] = []
        for entry, offset, length in pieces:
            start = 0 if entry == HEADER else self._layout.entries[entry].start
            for home in homes.get(entry) or [self._touched(entry, offset - start, length)]:
                _add(parts, (offset, length, home + offset - start))
        return parts

    def _touched(self, entry: int, within: int, length: int) -> int:
        """Where an entry's place begins, when the memory for a part of it is there."""
        memory, start = (self.memory, 0) if entry == HEADER else self._place(entry)
        memory.touch(start + within, start + within + length)
        return memory.address + start

    def settle(self, pieces: Sequence[Piece]) -> None:
        """Bring pieces of a chunk that lies as in the file to their places."""
        for offset, length, address in self.places(pieces):
            if address != self.memory.address + offset:
                copy_bytes(address, self.memory.address + offset, length)

    def release_all_but(self, kept: Collection[tuple[int, int]]) -> None:
        """Give the pages back to the system that hold nothing of these (address, length)."""
        for memory in (self.memory, self._apart):
            if memory is not None:
                memory.release_all_but([one for one in kept if memory.holds(one[0])])

    def _made_by(
        self, make: Callable[[Staging, int, torch.dtype, tuple[int, ...]], torch.Tensor], name: str
    ) -> torch.Tensor:
        entry = self._entry(name)
        memory, start = self._place(self._layout.by_name[name])
        return make(memory, start, DTYPES[entry.dtype], entry.shape)

    def _place(self, entry: int) -> tuple[Staging, int]:
        if self._apart is not None and entry in self._odd:
            return self._apart, self._odd[entry]
        return self.memory, self._layout.entries[entry].start

    def _entry(self, name: str) -> Entry:
        return self._layout.entries[self._layout.by_name[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.by_name)

    def __len__(self) -> int:
        return len(self._layout.by_name)


def _add(parts: list[Part], part: Part) -> None:
    """Add a part, joined with the one before where both lie side by side in the file and in memory."""
    if parts:
        offset, length, address = parts[-1]
        if offset + length == part[0] and address + length == part[2]:
            parts[-1] = (offset, length + part[1], address)
            return
    parts.append(part)


def _aligned_places(layout: Layout) -> tuple[Staging | None, dict[int, int]]:
    """Memory for the entries that are large and not aligned in the file, and where each begins in it."""
    found: dict[int, int] = {}
    at = 0
    for number, entry in enumerate(layout.entries):
        if entry.start % ALIGNED_BYTES and entry.bytes >= LASTING_BYTES:
            found[number] = at
            at += -(-entry.bytes // ALIGNED_BYTES) * ALIGNED_BYTES
    return (Staging(at, warm=False, inherited=True), found) if found else (None, found)
