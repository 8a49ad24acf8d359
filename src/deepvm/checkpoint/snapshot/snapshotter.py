"""Take snapshots: which tensors there are, where each goes in the file, and from where its bytes are read.

Input: the state's components. Output: a Snapshot for the saver, and the components' skeletons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepvm.checkpoint import ranks
from deepvm.checkpoint.buffers.copying import Copier, is_small
from deepvm.checkpoint.buffers.off_heap import run_off_heap
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.buffers.write_watch import shared_watch
from deepvm.checkpoint.snapshot.device import Arrivals, DeviceCopies
from deepvm.checkpoint.snapshot.file_size import HEADER_SLACK_BYTES, plan_layout, skeleton_bytes
from deepvm.checkpoint.snapshot.frozen import Frozen
from deepvm.checkpoint.snapshot.live_tensors import LiveTensors
from deepvm.checkpoint.snapshot.prefault import Warming, expected_bytes
from deepvm.checkpoint.snapshot.snapshot import Snapshot, stage
from deepvm.checkpoint.state.capture import Capture, Captured
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.checkpoint.state.layout import DTYPES, Layout, spec_of
from deepvm.checkpoint.state.owners import Owners
from deepvm.checkpoint.state.rank_difference import name_difference
from deepvm.errors import CheckpointError, OverBudget
from deepvm.units import format_bytes

log = logging.getLogger("deepvm.checkpoint")

MOST_WARMED = 3  # at the start, and after the first steps
MOST_DISTURBED = 3  # saves, before all that follow copy the state at once


@dataclass(frozen=True)
class _Plan:
    """What stays the same from save to save, as long as the state's tensors do."""

    chunk_map: ChunkMap
    text_bytes: int  # of the skeleton for which the header was planned
    live: LiveTensors
    small: list[str]  # names of small tensors that no optimizer owns, buffers for one: copied in one call
    places: list[torch.Tensor]  # where in staging memory each of these goes
    frozen: Frozen  # large parameters that are not trained
    others: list[tuple[str, int]]  # name and entry of all others
    on_device: list[tuple[str, int, int]]  # and of those on a GPU, with its address where an optimizer owns it

    def has_room(self, text_bytes: int) -> bool:
        return text_bytes <= self.text_bytes + HEADER_SLACK_BYTES // 4

    def still_fits(self, captured: Captured) -> bool:
        """True if the tensors are the same, and those read in place are where they were."""
        addresses, by_name = self.live.addresses, self.chunk_map.layout.by_name
        return captured.same and all(
            addresses[by_name[name]] in (None, tensor.data_ptr()) for name, tensor in captured.replaced.items()
        )

    def close(self) -> None:
        """Release the watched pages."""
        self.live.close()
        self.frozen.close()


class Snapshotter:
    """Takes the snapshots of one checkpointer."""

    def __init__(
        self,
        chunk_bytes: Callable[[], int],
        copies: Callable[[ChunkMap], list[int]],
        world_size: int,
        *,
        live: bool = True,
        budget_bytes: int | None = None,
    ) -> None:
        """``live``: read in place what can be watched, instead of copying everything at save()."""
        self._budget_bytes = budget_bytes
        self._chunk_bytes, self._copies, self._world_size = chunk_bytes, copies, world_size
        self._live, self._disturbed, self._copy_next = live, 0, False
        self._capture = Capture()
        self._copier = Copier()
        self.device_copies = DeviceCopies()
        self._plan: _Plan | None = None
        self._outgrown = False
        self.staging: Staging | None = None
        self.warming, self._warmed = Warming(), 0

    def take(self, state: Mapping[str, Any]) -> tuple[Snapshot, dict[str, bytearray]]:
        """Take a snapshot; with it the skeletons of the state's components. What cannot be watched is copied."""
        if self._outgrown and self._plan is not None:
            self._plan.close()
            self._plan = None
        self._outgrown = False
        live, self._copy_next = self._live and not self._copy_next, False
        last, begun = self._plan, False

        def begin() -> None:
            nonlocal begun
            if last is not None and last.live.unmoved():
                begun = True
                last.live.begin(live=live)  # large copies begin while this thread compares the state

        try:
            captured, plan = self._plan_together(state, begin)
            if plan is not last or not begun:
                plan.live.begin(live=live)
            return self._stage(plan, captured, live), captured.texts
        except BaseException:
            for one in (last, self._plan):
                if one is not None:
                    one.live.abandon()
            raise

    def _stage(self, plan: _Plan, captured: Captured, live: bool) -> Snapshot:
        """Copy what is not read in place."""
        if plan.small:
            with torch.no_grad():
                torch._foreach_copy_(plan.places, [captured.tensors[name] for name in plan.small])
        plan.live.finish()
        plan.frozen.stage(captured.tensors)
        for name, entry in plan.others:
            stage(plan.live.staging, plan.chunk_map.layout, entry, captured.tensors[name])
        arrivals = self._start_arrivals(plan, captured, live)
        return Snapshot(plan.live, self._copies(plan.chunk_map), arrivals)

    @property
    def staging_bytes(self) -> int:
        return 0 if self.staging is None else self.staging.size_bytes

    def disturbed(self) -> None:
        """Copy everything at the next save: what the last one read in place was written meanwhile."""
        self._copy_next = True
        self._disturbed += 1
        if self._live and self._disturbed >= MOST_DISTURBED:
            self._live = False
            log.warning("%d saves were disturbed by writes: from now on save() copies the state", self._disturbed)

    def _start_arrivals(self, plan: _Plan, captured: Captured, live: bool) -> Arrivals | None:
        loose: list[tuple[int, torch.Tensor]] = []
        owned: list[tuple[int, torch.Tensor]] = []
        for name, entry, address in plan.on_device:
            tensor = captured.tensors[name]
            if not self.device_copies.takes(tensor):  # it came down from the GPU since
                stage(plan.live.staging, plan.chunk_map.layout, entry, tensor)
            else:
                (owned if live and address and address == tensor.data_ptr() else loose).append((entry, tensor))
        return self.device_copies.start(plan.live.staging, plan.chunk_map.layout, loose, owned)

    def _plan_together(self, state: Mapping[str, Any], begin: Callable[[], None]) -> tuple[Captured, _Plan]:
        """Capture the state. All ranks plan, or none; with room for the longest skeleton, and with one layout."""

        def capture() -> tuple[Captured, list[int]]:
            captured = self._capture.take(state, begin)
            fits = self._plan is not None and self._plan.still_fits(captured)
            return captured, [not fits, not (fits or self._may_plan_again(captured)), skeleton_bytes(captured)]

        (captured, _), rows = ranks.agree("save()", capture, report=lambda found: found[1])
        needed, moved, text_bytes = (max(column) for column in zip(*rows, strict=True))
        plan = self._plan
        if plan is not None and not needed and plan.has_room(text_bytes):
            return captured, plan
        try:
            made, layouts = ranks.agree(
                "save()",
                lambda: self._make_plan(captured, state, text_bytes, again=not moved),
                report=lambda made: made.chunk_map.layout.fingerprint if self._world_size > 1 else None,
            )
            others = [rank for rank, layout in enumerate(layouts) if layout != layouts[0]]
            if others:
                raise CheckpointError(name_difference(captured, others[0]))
        except BaseException:
            self._plan = None
            raise
        self._plan = made
        return captured, made

    def _may_plan_again(self, captured: Captured) -> bool:
        """True if every tensor keeps its place in the file."""
        specs = [spec_of(name, tensor) for name, tensor in captured.tensors.items()]
        return self._plan is not None and self._plan.chunk_map.layout.holds(specs)

    def warm_up(self, state: Mapping[str, Any]) -> None:
        """Touch staging memory in the background, so that the first save finds it warm. Before the optimizers step, the
        size of their state is an estimate."""
        if self._plan is not None or self._warmed >= MOST_WARMED:
            return
        self._warmed += 1
        size_bytes = expected_bytes(state)
        if size_bytes > self.warming.size_bytes:
            self.warming.begin(size_bytes, self._budget_bytes)

    def close(self) -> None:
        if self._plan is not None:
            self._plan.close()
        self.warming.close()
        self._copier.close()
        self.device_copies.release()

    def forget_plan(self) -> None:
        """Make a new plan at the next save: the header has no room left."""
        self._outgrown = True

    def _make_plan(self, captured: Captured, state: Mapping[str, Any], text_bytes: int, *, again: bool) -> _Plan:
        """Plan off the heap, except for staging memory, which a GPU's driver may register: in the trainer's thread."""
        old, self._plan = self._plan, None  # a closed plan watches nothing: without a new one there is none
        if old is not None:
            old.close()
        owners = run_off_heap(lambda: Owners(state))
        chunk_map, text_bytes = run_off_heap(
            lambda: self._make_chunk_map(captured, owners, text_bytes, old if again else None)
        )
        staging = self._stage_memory(chunk_map.layout)
        return run_off_heap(lambda: self._plan_sources(captured, owners, chunk_map, text_bytes, staging))

    def _make_chunk_map(
        self, captured: Captured, owners: Owners, text_bytes: int, old: _Plan | None
    ) -> tuple[ChunkMap, int]:
        """Lay out the file, with room for the skeleton; as in the ``old`` plan, if that has room."""
        if old is not None and old.has_room(text_bytes):
            return old.chunk_map, old.text_bytes
        layout = plan_layout(captured, owners, text_bytes, self._world_size)
        self._check_budget(layout)
        return ChunkMap(layout, self._chunk_bytes()), text_bytes

    def _plan_sources(
        self, captured: Captured, owners: Owners, chunk_map: ChunkMap, text_bytes: int, staging: Staging
    ) -> _Plan:
        owned_tensors: list[torch.Tensor | None] = [None] * len(captured.tensors)
        small, others, still, on_device = [], [], [], []
        owned, frozen = owners.owned, owners.frozen - owners.owned
        for name, tensor in captured.tensors.items():
            entry = chunk_map.layout.by_name[name]
            readable = tensor.device.type == "cpu" and tensor.is_contiguous()
            if self.device_copies.takes(tensor):
                on_device.append((name, entry, tensor.data_ptr() if tensor.data_ptr() in owned else 0))
            elif readable and tensor.data_ptr() in owned:
                owned_tensors[entry] = tensor
            elif is_small(tensor):
                small.append(name)
            elif readable and tensor.data_ptr() in frozen:
                still.append((name, entry))
            else:
                others.append((name, entry))
        entries = [chunk_map.layout.entries[chunk_map.layout.by_name[name]] for name in small]
        places = [staging.tensor(where.start, DTYPES[where.dtype], where.shape) for where in entries]
        watch = shared_watch() if still or (self._live and any(t is not None for t in owned_tensors)) else None
        live = LiveTensors(chunk_map, owned_tensors, staging, self._copier, watch if self._live else None)
        live_pages = live.pages.pages if live.pages is not None else set()
        unchanged = Frozen(staging, chunk_map.layout, still, self._copier, watch, live_pages)
        return _Plan(chunk_map, text_bytes, live, small, places, unchanged, others, on_device)

    def _check_budget(self, layout: Layout) -> None:
        if self._budget_bytes is not None and layout.size_bytes > self._budget_bytes:
            raise OverBudget(
                f"a snapshot needs {format_bytes(layout.size_bytes)} of staging memory, the budget is "
                f"{format_bytes(self._budget_bytes)}: raise memory_budget_bytes"
            )

    def _stage_memory(self, layout: Layout) -> Staging:
        warmed = self.warming.take(layout.size_bytes)
        if self.staging is None:
            self.staging = warmed
        if self.staging is None or self.staging.size_bytes < layout.size_bytes:
            self.device_copies.release()
            self.staging = None  # freed before the new one is allocated
            self.staging = Staging(layout.size_bytes)
        return self.staging
