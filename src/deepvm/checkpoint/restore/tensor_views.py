"""A checkpoint's layout and memory -> its tensors, as views. ``load`` and ``lazy`` give them to components."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.restore.chunk_reader import Part, scatter
from deepvm.checkpoint.state.chunk_map import HEADER
from deepvm.checkpoint.state.layout import ALIGNED_BYTES, DTYPES, Layout

Piece = tuple[int, int, int]  # of a chunk: entry, offset in the file, length
_NO_TARGETS: Mapping[int, Sequence[int]] = {}
KEEP_BYTES = 64 * 1024  # a smaller tensor is copied in less time than it takes to give it memory of its own


def is_aligned(tensor: torch.Tensor) -> bool:
    """True if torch computes with it as fast as with its own tensors."""
    return tensor.data_ptr() % ALIGNED_BYTES == 0


class TensorViews(Mapping[str, torch.Tensor]):
    """Every tensor of a checkpoint, created when it is asked for. Most lie as in the file. Large ones that are not
    aligned there would be copied again before anything can keep them: in memory of the restore's own, each of these has
    an aligned place."""

    def __init__(self, memory: Staging, layout: Layout) -> None:
        self.memory, self._layout = memory, layout
        self._views: dict[str, torch.Tensor] = {}
        self._realigned: dict[int, int] = {}  # entry -> offset in the second memory
        self._memory_aligned: Staging | None = None
        if memory.own:
            self._realign()

    def _realign(self) -> None:
        at = 0
        for number, entry in enumerate(self._layout.entries):
            if entry.start % ALIGNED_BYTES and entry.bytes >= KEEP_BYTES:
                self._realigned[number] = at
                at += -(-entry.bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        if at:
            self._memory_aligned = Staging(at, warm=False, inherited=True)

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._views.get(name)
        if found is None:
            found = self._views[name] = self._make(Staging.tensor, name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layout.entries[self._layout.by_name[name]].shape

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._layout.entries[self._layout.by_name[name]].dtype]

    def owning(self, name: str) -> torch.Tensor:
        """Return a tensor that keeps its own pages when the others are freed."""
        return self._make(Staging.lasting_tensor, name)

    def address(self, entry: int) -> int:
        memory, start = self._place(entry)
        return memory.address + start

    def places(self, pieces: Sequence[Piece], targets: Mapping[int, Sequence[int]] = _NO_TARGETS) -> list[Part]:
        """Return where the pieces of a chunk go: to the ``targets`` of an entry, which are addresses, or to its place
        here, whose memory is then touched."""
        parts: list[Part] = []
        for entry, offset, length in pieces:
            start = 0 if entry == HEADER else self._layout.entries[entry].start
            for target in targets.get(entry) or [self._touched(entry, offset - start, length)]:
                _add(parts, (offset, length, target + offset - start))
        return parts

    def _touched(self, entry: int, within: int, length: int) -> int:
        """Return the address of an entry, with memory for a part of it."""
        memory, start = (self.memory, 0) if entry == HEADER else self._place(entry)
        memory.touch(start + within, start + within + length)
        return memory.address + start

    def move_to_places(self, pieces: Sequence[Piece]) -> None:
        """Copy the pieces of a chunk that was read as it lies in the file."""
        scatter(self.memory.address, 0, self.places(pieces))

    def release_all_but(self, kept: Collection[tuple[int, int]]) -> None:
        """Free the pages that hold nothing of these (address, length)."""
        for memory in (self.memory, self._memory_aligned):
            if memory is not None:
                memory.release_all_but([one for one in kept if memory.holds(one[0])])

    def _make(
        self, make: Callable[[Staging, int, torch.dtype, tuple[int, ...]], torch.Tensor], name: str
    ) -> torch.Tensor:
        memory, start = self._place(self._layout.by_name[name])
        return make(memory, start, self.dtype(name), self.shape(name))

    def _place(self, entry: int) -> tuple[Staging, int]:
        if self._memory_aligned is not None and entry in self._realigned:
            return self._memory_aligned, self._realigned[entry]
        return self.memory, self._layout.entries[entry].start

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.by_name)

    def __len__(self) -> int:
        return len(self._layout.by_name)


def _add(parts: list[Part], part: Part) -> None:
    """Add a part, joined with the one before if both are adjacent in the file and in memory."""
    if parts:
        offset, length, address = parts[-1]
        if offset + length == part[0] and address + length == part[2]:
            parts[-1] = (offset, length + part[1], address)
            return
    parts.append(part)
