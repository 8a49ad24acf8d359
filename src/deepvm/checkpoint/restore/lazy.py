"""A selection whose bytes have not arrived -> components that the first step can use: restore on demand.

Parameters are received straight into their own memory (or used in place in a mapped file: ``mapped_parameter``), in the
order in which an earlier run used them, and each module waits only for its own. The optimizer's state, two thirds of an
Adam checkpoint, comes after them, and the first optimizer step waits for it. All other state is small and is loaded by
``start``. ``checkpoint.restorer`` finishes or abandons a lazy restore.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from deepvm.checkpoint.restore import pending
from deepvm.checkpoint.restore.chunk_reader import ChunkReader, ChunkSource, Part
from deepvm.checkpoint.restore.load import OwnedTensors, by_loading, load_component
from deepvm.checkpoint.restore.mapped_parameter import MappedParameter
from deepvm.checkpoint.restore.parameters import load_rest, memory_of, owns_memory, plain_parameters, used_by
from deepvm.checkpoint.restore.selection import Selection
from deepvm.checkpoint.restore.tensor_views import TensorViews, is_aligned
from deepvm.checkpoint.restore.use_order import modules_in_order
from deepvm.checkpoint.restore.validation import Undo, rebuilt
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.checkpoint.state.optimizer_state import loads_as_torch, with_layouts, with_numbers
from deepvm.checkpoint.state.skeleton import module_tensors, names_of_tensors, rebuild
from deepvm.checkpoint.state.unwrapping import bare
from deepvm.checkpoint.torch_modes import without_ambient_modes
from deepvm.errors import CheckpointError
from deepvm.store.base import Manifest


class LazyRestore:
    """One restore that is under way; all methods are for the trainer's thread. ``tensors`` is the memory for what does
    not go straight into a parameter; no page of it is touched before its bytes arrive."""

    def __init__(
        self,
        selected: Selection,
        tensors: TensorViews,
        chunk_map: ChunkMap,
        source: ChunkSource,
        manifest: Manifest,
        deadline_s: float,
    ) -> None:
        self._selected, self._tensors, self._chunk_map = selected, tensors, chunk_map
        self._layout, self._deadline_s = chunk_map.layout, deadline_s
        self._step, self._url = manifest.step, source.url
        self._targets: dict[int, list[int]] = {}  # entry -> the addresses of the parameters that it fills
        self._pending: dict[int, tuple[torch.nn.Parameter, int]] = {}  # by id: the parameter and its entry
        self._mapped: dict[int, MappedParameter] = {}  # by entry
        self._arrivals: dict[int, pending.Arrive] = {}  # by entry
        self._states: dict[str, pending.PendingState] = {}
        self._process = os.getpid()  # a forked one receives nothing
        self._owned = OwnedTensors(tensors)  # until all is loaded
        self._hooks: list[RemovableHandle] = []
        self._loading = False
        self._on_end: Callable[[], None] | None = None
        self._late = [name for name, part in selected.components.items() if _loads_late(part)]
        for name in selected.own:
            self._find_parameters(name)
        late, self._now = self._other_entries()
        for entry in [*late, *self._now]:
            if entry in self._targets:  # tied to something that is not a parameter of a module
                self._targets[entry].append(tensors.address(entry))
        # Bytes are on their way into this memory, also if torch.utils.swap_tensors gives it to a tensor that dies.
        self._received_into = [memory_of(parameter) for parameter, _ in self._pending.values()]
        order, eager_count = self._order(self._now, late)
        # The first forward waits for all of its chunks at once if they are in memory: verifying them takes all cores
        # for an instant, and a forward that shares the cores takes longer than one after the other.
        self._together: Sequence[int] = ()
        if source.in_memory:
            self._plan_mapped()
            self._together = order[:eager_count]
        self._reader = ChunkReader(source, manifest, self._place, order, eager_count=eager_count)

    def start(self) -> None:
        """Load all but parameters and optimizer state, and let these wait for their bytes."""
        components, own = self._selected.components, self._selected.own
        names = [name for name in components if name not in own]
        early = [name for name in names if hasattr(components[name], "load_state_dict") and not self._tensors_now(name)]
        with Undo() as undo:
            for name in early:  # before bytes may go straight into parameters
                self._load_one(name, undo)
            self._reader.start()
            try:
                self._reader.wait(self._chunk_map.chunks_of(self._now), self._deadline_s)
                for name in names:
                    if name not in early and hasattr(components[name], "load_state_dict"):
                        self._load_one(name, undo)
                for name in chain(*by_loading(self._selected)):
                    skeleton = self._selected.skeleton[name]
                    load_rest(components[name], own[name], skeleton, self._tensors, self._pending)
                for name in names:
                    if not hasattr(components[name], "load_state_dict"):
                        self._load_one(name, undo)
            except BaseException:
                self._reader.close()
                raise
        for parameter, entry in self._pending.values():
            self._arrivals[entry] = partial(self._arrive, entry)
            pending.attach(parameter, self._arrivals[entry])
        if not self._pending:  # no forward competes for the cores
            self._reader.resume()
        self._hook()

    @property
    def open(self) -> bool:
        """True if something is not loaded yet."""
        return bool(self._pending) or bool(self._late)

    def when_over(self, do: Callable[[], None]) -> None:
        """Call ``do`` once nothing is read from the store any more."""
        self._on_end = do

    @without_ambient_modes()
    def finish(self) -> None:
        """Load everything. Steps after this have no overhead."""
        if self._loading:  # loading an optimizer calls its state_dict, whose hook calls this
            return
        if self.open:
            self._check_process()
            try:
                self._reader.wait_all(self._deadline_s)
            except Exception as error:
                raise self._failed(error) from error
            self._detach_all()
            self._loading = True
            try:
                self._load_late(self._end_mapped())
            finally:
                self._loading = False
        self._end()

    def abandon(self) -> None:
        """Stop with what has arrived, for a restore that starts again."""
        self._detach_all()
        for state in self._states.values():
            state.detach()
        self._late = []
        self._mapped = {entry: mapped for entry, mapped in self._mapped.items() if mapped.begun}
        self._end_mapped()
        self._end()

    def _detach_all(self) -> None:
        for parameter, _ in self._pending.values():
            pending.detach(parameter)
        self._pending = {}

    def _end(self) -> None:
        self._reader.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._owned.forget()
        self._states, self._received_into = {}, []
        self._selected = Selection()  # the components are the trainer's
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    # --- what goes where ----------------------------------------------------------------------------------------

    def _find_parameters(self, name: str) -> None:
        """Find the parameters of a module that bytes can be received into, and the entries that fill them."""
        selected = self._selected
        found = plain_parameters(selected.components[name], selected.own[name], selected.skeleton[name], self._tensors)
        for parameter, saved in found.values():
            if id(parameter) not in self._pending:
                entry = self._layout.by_name[saved]
                self._pending[id(parameter)] = parameter, entry
                self._targets.setdefault(entry, []).append(parameter.data_ptr())

    def _plan_mapped(self) -> None:
        """Find the parameters that can use the mapped bytes in place: each the only one that an entry fills."""
        for parameter, entry in self._pending.values():
            mapped = self._tensors[self._layout.entries[entry].name]
            if len(self._targets[entry]) == 1 and is_aligned(mapped) and owns_memory(parameter):
                self._mapped[entry] = MappedParameter(parameter, mapped)
                del self._targets[entry]

    def _end_mapped(self) -> list[int]:
        """Copy every parameter into its own memory; returns the entries of those that must stay in the mapping."""
        ended, self._mapped = self._mapped, {}
        return [entry for entry, mapped in ended.items() if not mapped.end()]

    def _place(self, chunk: int) -> list[Part]:
        return self._tensors.places(self._chunk_map.parts[chunk], self._targets)

    def _tensors_now(self, name: str) -> set[str]:
        """Return the names of a component's tensors that ``start`` loads; an optimizer's state is loaded later."""
        skeleton = self._selected.skeleton[name]
        return names_of_tensors(skeleton["param_groups"] if name in self._late else skeleton)

    def _other_entries(self) -> tuple[list[int], list[int]]:
        """Return the entries of the optimizers' state, and all others but those of pending parameters."""
        late: set[str] = set()
        now: set[str] = set()
        for name, skeleton in self._selected.skeleton.items():
            found = self._tensors_now(name)
            if name in self._late:
                late |= names_of_tensors(skeleton["state"])
            elif (keys := self._selected.own.get(name)) is not None:
                saved = module_tensors(skeleton)
                tensors = [(saved[key], id(tensor) in self._pending) for key, tensor in keys.items() if key in saved]
                found -= {tensor for tensor, pending in tensors if pending}
                found |= {tensor for tensor, pending in tensors if not pending}  # a pending one may be tied to it
            now |= found
        by_name = self._layout.by_name
        return sorted(by_name[n] for n in late - now), sorted(by_name[n] for n in now)

    def _order(self, now: Sequence[int], late: Sequence[int]) -> tuple[list[int], int]:
        """Return the chunks in the order of reading, and how many of them the first forward needs: what ``start``
        loads, modules in the order of their use, the optimizers' state, modules that were not used."""
        used: list[int] = []
        unused: list[int] = []
        for name in self._selected.own:
            modules = dict(self._selected.components[name].named_modules())
            known = {bare(path): module for path, module in modules.items()} | modules
            paths = modules_in_order(self._selected.skeleton, name)
            ran = [known[m] for m in (path if path in known else bare(path) for path in paths) if m in known]
            used += self._own_entries(ran)
            (unused if ran else used).extend(self._own_entries(modules.values()))
        chunks_of = self._chunk_map.chunks_of
        return chunks_of([*now, *used, *late, *unused]), len(chunks_of([*now, *used]))

    def _own_entries(self, modules: Iterable[torch.nn.Module]) -> list[int]:
        own = (p for module in modules for p in used_by(module))
        return [self._pending[id(p)][1] for p in own if id(p) in self._pending]

    # --- arrivals -----------------------------------------------------------------------------------------------

    @without_ambient_modes()
    def _wait(self, chunks: Sequence[int]) -> None:
        self._check_process()
        together, self._together = self._together, ()
        try:
            self._reader.wait(together or chunks, self._deadline_s)
        except Exception as error:
            raise self._failed(error) from error
        if together:
            for parameter, entry in list(self._pending.values()):
                if self._reader.has(self._chunk_map.chunks_of_one(entry)):
                    self._settle(parameter, entry)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise CheckpointError(
                f"step {self._step} is still being restored, and this process was forked meanwhile: call "
                "finish_restore() before starting processes that use the model"
            )

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"reading step {self._step} from {self._url} failed, and the state is not whole: {error}; restore() again, "
            "which falls back to a whole checkpoint"
        )

    @without_ambient_modes()
    def _arrive(self, entry: int, parameter: torch.nn.Parameter) -> None:
        """Wait for the bytes of a parameter, or of what ``torch.utils.swap_tensors`` made of it."""
        if self.open:
            self._wait(self._chunk_map.chunks_of_one(entry))
            self._settle(parameter, entry)

    def _settle(self, parameter: torch.nn.Parameter, entry: int) -> None:
        """Make a parameter whose bytes have arrived an ordinary one. One that was swapped for another stays as it is,
        and its bytes go into the memory that was its own."""
        if known := self._pending.get(id(parameter), (parameter, None))[1] == entry:
            del self._pending[id(parameter)]
        mapped = self._mapped.get(entry)
        if known and pending.arrival_of(parameter) is self._arrivals.get(entry):
            pending.detach(parameter)
            if mapped:
                mapped.begin()
        elif mapped:
            self._mapped.pop(entry).end()

    def _load_one(self, name: str, undo: Undo) -> None:
        if name in self._late:  # its settings are needed at once: a schedule may read or change them
            groups = rebuild(self._selected.skeleton[name]["param_groups"], self._owned)
            state = with_numbers({"state": {}, "param_groups": groups})
        else:
            state = rebuilt(self._selected, name, self._owned)
        load_component(self._selected, name, state, undo)

    def _load_late(self, kept: Sequence[int]) -> None:
        """Load the optimizers' state, and free the memory that neither they nor these entries need."""
        for entry in kept:
            self._owned[self._layout.entries[entry].name]
        for name in self._late:
            optimizer: torch.optim.Optimizer = self._selected.components[name]
            if name in self._states and not self._states.pop(name).detach():
                continue  # the user's
            laid_out = with_layouts(optimizer, self._selected.skeleton[name], self._tensors)
            state = rebuild(laid_out["state"], self._owned)
            groups = optimizer.state_dict()["param_groups"]
            try:
                with Undo() as undo:
                    undo.keep(optimizer)
                    optimizer.load_state_dict(with_numbers({"state": state, "param_groups": groups}))
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise self._failed(error) from error
        self._late = []
        self._owned.release_others()

    # --- hooks --------------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        for component in (self._selected.components[name] for name in self._selected.own):
            for module in component.modules():
                needed = [p for p in used_by(module) if id(p) in self._pending]
                if needed:
                    self._hook_module(module, needed)
            self._hooks.append(component.register_forward_hook(pending.Hook(self._reader.resume)))
        for name in self._late:
            optimizer: torch.optim.Optimizer = self._selected.components[name]
            self._states[name] = pending.PendingState(optimizer, self.finish)
            self._states[name].attach()
            self._hooks.append(optimizer.register_step_pre_hook(self._finish_first))
            self._hooks.append(optimizer.register_state_dict_pre_hook(self._finish_first))

    def _finish_first(self, *_: object) -> None:
        self.finish()

    def _hook_module(self, module: torch.nn.Module, needed: list[torch.nn.Parameter]) -> None:
        def wait() -> None:
            handle.remove()
            entries = [self._pending[id(p)][1] for p in needed if id(p) in self._pending]
            if entries:
                self._wait(self._chunk_map.chunks_of(entries))  # together, not one by one
                for parameter in needed:
                    pending.wait(parameter)

        handle: RemovableHandle = module.register_forward_pre_hook(pending.Hook(wait))
        self._hooks.append(handle)


def _loads_late(component: Any) -> bool:
    """True if it can load its groups first, and its state when it steps."""
    return isinstance(component, torch.optim.Optimizer) and loads_as_torch(component)
