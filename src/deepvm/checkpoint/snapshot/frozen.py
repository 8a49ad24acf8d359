"""Parameters that are not trained: copied at the first save, and later only if they were written since.

Input: the frozen parameters of a plan. Output, at each save: their bytes in staging memory. They stay protected
between saves, so that the kernel knows whether the copy is still valid. A moving average is frozen, too, and changes at
every step: after its first change it is copied at each save. So is everything if the kernel has no watch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from deepvm.checkpoint.buffers.copying import ALONE_BYTES, Copier, Span, copy_jobs
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.buffers.write_watch import Range, WriteWatch, joined, plain_memory
from deepvm.checkpoint.snapshot.live_pages import MOST_RUNS, watchable, whole_pages, within
from deepvm.checkpoint.state.layout import Layout


class Frozen:
    """``entries`` are names and entries of the layout."""

    def __init__(
        self,
        staging: Staging,
        layout: Layout,
        entries: Sequence[tuple[str, int]],
        copier: Copier,
        watch: WriteWatch | None,
        live_pages: set[int],
    ) -> None:
        self._staging, self._layout, self._copier = staging, layout, copier
        self._entries, self._watch = entries, watch
        self._live_pages = live_pages  # huge pages that are unprotected before every step
        self._watched: dict[str, _Watched] = {}
        self._changing: set[str] = set()
        self._owner, self._memory = object(), [] if watch is None or not entries else plain_memory()
        self.close = weakref.finalize(self, _release, watch, self._owner, self._watched)
        self.close.atexit = False

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Bring the copies in staging memory up to date."""
        spans: list[Span] = []
        for name, entry in self._entries:
            spans += self._to_copy(name, self._staging.address + self._layout.entries[entry].start, tensors[name])
        self._copier.do(copy_jobs(spans), alone=sum(length for _, _, length in spans) <= ALONE_BYTES)

    def _to_copy(self, name: str, to: int, tensor: torch.Tensor) -> list[Span]:
        known, address = self._watched.get(name), tensor.data_ptr()
        if known is not None and known.address == address and self._watch is not None:
            if self._watch.untouched(known.pages):
                return known.edges(to)
            self._changing.add(name)
        if known is not None:
            del self._watched[name]
            known.release()
        room = self.close.alive and len(self._watched) < MOST_RUNS
        if self._watch is not None and room and name not in self._changing and watchable(tensor):
            pages = self._protect(self._watch, *whole_pages(address, tensor.nbytes))
            if pages:
                self._watched[name] = _Watched(self._watch, tensor, pages)
        return [(to, address, tensor.nbytes)] if tensor.nbytes else []

    def _protect(self, watch: WriteWatch, start: int, end: int) -> list[Range]:
        """Protect the pages between that have no other watcher, before they are copied: what is written meanwhile is
        copied again at the next save."""
        huge = watch.huge_bytes or 2**21
        numbers = set(range(start // huge, -(-end // huge))) - self._live_pages
        pages = (
            part
            for number in sorted(watch.claim(self._owner, numbers))
            for part in within(self._memory, max(start, number * huge), min(end, (number + 1) * huge))
        )
        return [part for part in joined(pages) if watch.register(*part) and watch.protect(*part)]


class _Watched:
    """A tensor, held with its memory, and the pages of it that are protected."""

    def __init__(self, watch: WriteWatch, tensor: torch.Tensor, pages: Sequence[Range]) -> None:
        self._watch, self._tensor = watch, tensor.detach()
        self.address, self.pages = tensor.data_ptr(), pages

    def edges(self, to: int) -> list[Span]:
        """Return the copies of what is not protected: needed at every save."""
        found, at = [], self.address
        for start, end in [*self.pages, (self.address + self._tensor.nbytes,) * 2]:
            if start > at:
                found.append((to + at - self.address, at, start - at))
            at = end
        return found

    def release(self) -> None:
        for part in self.pages:
            self._watch.unregister(*part)


def _release(watch: WriteWatch | None, owner: object, watched: dict[str, _Watched]) -> None:
    for known in watched.values():
        known.release()
    watched.clear()
    if watch is not None:
        watch.disclaim(owner)
