"""Restore on demand: the first step begins while the checkpoint is still coming in.

Parameters are received straight into their own memory (or, from a mapped file, used where they lie:
mapped_parameter.py), in the order in which an earlier run used them, and a module waits only for its own. The
optimizer's state, two thirds of an Adam checkpoint, comes after them, and is waited for when the optimizer first steps.
Everything else (buffers, schedulers, counters) is small, and there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from deepvm.checkpoint.restore import pending_parameter
from deepvm.checkpoint.restore.chunk_reader import ChunkReader, ChunkSource, Part
from deepvm.checkpoint.restore.load import OwnedTensors, load_component
from deepvm.checkpoint.restore.mapped_parameter import MappedParameter
from deepvm.checkpoint.restore.parameters import TORCH_NN, is_compiled, load_rest, owns_memory, plain_parameters
from deepvm.checkpoint.restore.rehearsal import Undo, rebuilt
from deepvm.checkpoint.restore.selection import Selection
from deepvm.checkpoint.restore.tensor_views import TensorViews, is_aligned
from deepvm.checkpoint.restore.use_order import modules_in_order
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.checkpoint.state.layout import Layout
from deepvm.checkpoint.state.optimizer_state import loads_as_torch, with_layouts, with_numbers
from deepvm.checkpoint.state.skeleton import module_tensors, names_of_tensors, rebuild
from deepvm.checkpoint.state.unwrapping import bare
from deepvm.errors import CheckpointError
from deepvm.store.base import Manifest

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class SavedTensors:
    """Where the bytes come from, and what they are."""

    chunks: ChunkSource
    manifest: Manifest
    layout: Layout
    deadline_s: float


class LazyRestore:
    """One restore that is under way. All of its methods are for the trainer's thread. The memory of ``tensors`` is for
    all that does not go straight into a parameter; it is not touched before bytes come."""

    def __init__(self, selected: Selection, tensors: TensorViews, source: SavedTensors) -> None:
        self._selected, self._tensors, self._source = selected, tensors, source
        self._pieces = ChunkMap(source.layout, source.manifest.chunk_bytes)
        self._homes: dict[int, list[int]] = {}  # entry -> the addresses of the parameters that it fills
        self._of_parameter: dict[int, tuple[torch.nn.Parameter, int]] = {}  # by id: the parameter and its entry
        self._loans: dict[int, MappedParameter] = {}  # by entry
        self._adopted = OwnedTensors(tensors)  # until all is in its place, and others have what they keep
        self._hooks: list[RemovableHandle] = []
        self._loading = False
        self._afterwards: Callable[[], None] | None = None
        self._late = [name for name, part in selected.components.items() if _comes_late(part)]
        for name in selected.own:
            self._find_parameters(name)
        late, now = self._others()
        for entry in [*late, *now]:
            if entry in self._homes:  # tied to something that is no parameter of a module
                self._homes[entry].append(tensors.address(entry))
        order, eager_count = self._order(now, late)
        # What a first forward needs is waited for as a whole where it is in memory already: verifying takes all cores
        # for an instant, and a forward that shares them with it takes longer than one after the other.
        self._together: Sequence[int] = ()
        if source.chunks.in_memory:
            self._plan_loans()
            self._together = order[:eager_count]
        with Undo() as undo:
            rest = self._load_bare(undo)
            self._reader = ChunkReader(source.chunks, source.manifest, self._place, order, eager_count=eager_count)
            try:
                self._reader.wait(self._pieces.chunks_of(now), source.deadline_s)
                self._load_now(rest, undo)
            except BaseException:
                self._reader.close()
                raise
        for parameter, _ in self._of_parameter.values():
            pending_parameter.attach(parameter, self._arrive)
        if not self._of_parameter:  # of no forward on these cores
            self._reader.resume()
        self._hook()

    @property
    def step(self) -> int:
        return self._source.manifest.step

    @property
    def open(self) -> bool:
        """Whether something is not in its place yet."""
        return bool(self._of_parameter) or bool(self._late)

    def when_over(self, do: Callable[[], None]) -> None:
        """Call something once nothing is read from the store any more."""
        self._afterwards = do

    def finish(self) -> None:
        """Everything in its place. Afterwards a step costs what it always did."""
        if self._loading:  # an optimizer is asked for its settings meanwhile, and its hook comes here
            return
        if self.open:
            try:
                self._reader.wait_all(self._source.deadline_s)
            except Exception as error:
                raise self._failed(error) from error
            for parameter, _ in self._of_parameter.values():
                pending_parameter.detach(parameter)
            self._of_parameter = {}
            self._loading = True
            try:
                self._load_late(self._end_loans())
            finally:
                self._loading = False
        self._end()

    def abandon(self) -> None:
        """Stop, with whatever is there; for a restore that begins anew."""
        for parameter, _ in self._of_parameter.values():
            pending_parameter.detach(parameter)
        self._of_parameter, self._late = {}, []
        self._loans = {entry: loan for entry, loan in self._loans.items() if loan.begun}
        self._end_loans()
        self._end()

    def _end(self) -> None:
        self._reader.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._adopted.forget()
        self._selected = Selection()  # theirs is theirs from here on
        afterwards, self._afterwards = self._afterwards, None
        if afterwards is not None:
            afterwards()

    # --- what goes where ----------------------------------------------------------------------------------------

    def _find_parameters(self, name: str) -> None:
        """The parameters of a module that bytes can be received into, and the entries that fill them."""
        selected = self._selected
        found = plain_parameters(selected.components[name], selected.own[name], selected.skeleton[name], self._tensors)
        for parameter, saved in found.values():
            if id(parameter) not in self._of_parameter:
                entry = self._source.layout.by_name[saved]
                self._of_parameter[id(parameter)] = parameter, entry
                self._homes.setdefault(entry, []).append(parameter.data_ptr())

    def _plan_loans(self) -> None:
        """The parameters that need not be copied before they are used: each the only one that its bytes are for."""
        for parameter, entry in self._of_parameter.values():
            mapped = self._tensors[self._source.layout.entries[entry].name]
            if len(self._homes[entry]) == 1 and is_aligned(mapped) and owns_memory(parameter):
                self._loans[entry] = MappedParameter(parameter, mapped)
                del self._homes[entry]

    def _end_loans(self) -> list[int]:
        """Every parameter into its own memory again; the entries of those that have to stay where they are."""
        loans, self._loans = self._loans, {}
        return [entry for entry, loan in loans.items() if not loan.end()]

    def _place(self, chunk: int) -> list[Part]:
        return self._tensors.places(self._pieces.parts[chunk], self._homes)

    def _others(self) -> tuple[list[int], list[int]]:
        """The entries that are the optimizers' state, and those that are anything else but awaited parameters."""
        late: set[str] = set()
        now: set[str] = set()
        for name in self._selected.components:
            skeleton = self._selected.skeleton[name]
            keys = self._selected.own.get(name)
            if keys is not None:
                saved = module_tensors(skeleton)
                waiting = {saved[k] for k, tensor in keys.items() if k in saved and id(tensor) in self._of_parameter}
                rest = [k for k, tensor in keys.items() if k in saved and id(tensor) not in self._of_parameter]
                now |= (names_of_tensors(skeleton) - waiting) | {saved[k] for k in rest}
            elif name in self._late:
                late |= names_of_tensors(skeleton["state"])
                now |= names_of_tensors(skeleton["param_groups"])
            else:
                now |= names_of_tensors(skeleton)
        by_name = self._source.layout.by_name
        return sorted(by_name[n] for n in late - now), sorted(by_name[n] for n in now)

    def _order(self, now: Sequence[int], late: Sequence[int]) -> tuple[list[int], int]:
        """What is small, what runs first, what runs later, what the optimizer needs; last what nobody was seen to use.
        What no component asks for does not come at all. And how many of these chunks a first forward needs."""
        used: list[int] = []
        unused: list[int] = []
        for name in self._selected.own:
            modules = dict(self._selected.components[name].named_modules())
            known = {bare(path): module for path, module in modules.items()} | modules
            ran = modules_in_order(self._selected.skeleton, name)
            seen = [known[m] for m in (path if path in known else bare(path) for path in ran) if m in known]
            used += self._own_entries(seen)
            rest = self._own_entries(modules.values())
            (unused if seen else used).extend(rest)
        return self._pieces.chunks_of([*now, *used, *late, *unused]), len(self._pieces.chunks_of([*now, *used]))

    def _own_entries(self, modules: Iterable[torch.nn.Module]) -> list[int]:
        own = (p for module in modules for p in _used_by(module))
        return [self._of_parameter[id(p)][1] for p in own if id(p) in self._of_parameter]

    # --- arrivals -----------------------------------------------------------------------------------------------

    def _wait(self, chunks: Sequence[int]) -> None:
        together, self._together = self._together, ()
        try:
            self._reader.wait(together or chunks, self._source.deadline_s)
        except Exception as error:
            raise self._failed(error) from error
        if together:
            for parameter, entry in list(self._of_parameter.values()):
                if self._reader.has(self._pieces.chunks_of_one(entry)):
                    self._settle(parameter, entry)

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"step {self.step} stopped coming in from {self._source.chunks.url}, and the state is not whole: {error}; "
            "restore() again, which falls back to what is whole"
        )

    def _arrive(self, parameter: torch.nn.Parameter) -> None:
        found = self._of_parameter.get(id(parameter))
        if found is not None:
            self._wait(self._pieces.chunks_of_one(found[1]))
            self._settle(*found)

    def _settle(self, parameter: torch.nn.Parameter, entry: int) -> None:
        """An ordinary one from here on: its bytes are there."""
        pending_parameter.detach(parameter)
        if self._of_parameter.pop(id(parameter), None) is not None and entry in self._loans:
            self._loans[entry].begin()

    def _load_bare(self, undo: Undo) -> list[str]:
        """What needs no tensors, before bytes come that may go straight into parameters; the names of the others."""
        rest: list[str] = []
        values: list[str] = []
        for name, component in self._selected.components.items():
            skeleton = self._selected.skeleton[name]
            if name in self._selected.own or names_of_tensors(
                skeleton["param_groups"] if name in self._late else skeleton
            ):
                rest.append(name)
            elif hasattr(component, "load_state_dict"):
                self._load_one(name, undo)
            else:
                values.append(name)
        return [*rest, *values]

    def _load_now(self, names: Sequence[str], undo: Undo) -> None:
        """What is not a parameter, and not the optimizer's state; modules last."""
        own = self._selected.own
        for name in names:
            if name not in own:
                self._load_one(name, undo)
        for name, live in own.items():
            skeleton = self._selected.skeleton[name]
            load_rest(self._selected.components[name], live, skeleton, self._tensors, self._of_parameter)

    def _load_one(self, name: str, undo: Undo) -> None:
        if name in self._late:  # its settings count at once: a schedule may look at them, or change them
            groups = rebuild(self._selected.skeleton[name]["param_groups"], self._adopted)
            state = with_numbers({"state": {}, "param_groups": groups})
        else:
            state = rebuilt(self._selected, name, self._adopted)
        load_component(self._selected, name, state, undo)

    def _load_late(self, kept: Sequence[int]) -> None:
        for entry in kept:
            self._adopted[self._source.layout.entries[entry].name]
        for name in self._late:
            optimizer: torch.optim.Optimizer = self._selected.components[name]
            laid_out = with_layouts(optimizer, self._selected.skeleton[name], self._tensors)
            state = rebuild(laid_out["state"], self._adopted)
            groups = optimizer.state_dict()["param_groups"]
            try:
                with Undo() as undo:
                    undo.keep(optimizer)
                    optimizer.load_state_dict(with_numbers({"state": state, "param_groups": groups}))
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise self._failed(error) from error
        self._late = []
        self._adopted.release_others()

    # --- hooks --------------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        for component in (self._selected.components[name] for name in self._selected.own):
            for module in component.modules():
                wanted = [p for p in _used_by(module) if id(p) in self._of_parameter]
                if wanted:
                    self._hook_module(module, wanted)
            self._hooks.append(component.register_forward_hook(self._go_on))
        for name in self._late:
            optimizer: torch.optim.Optimizer = self._selected.components[name]
            self._hooks.append(optimizer.register_step_pre_hook(self._finish_first))
            self._hooks.append(optimizer.register_state_dict_pre_hook(self._finish_first))

    def _go_on(self, *_: object) -> None:
        pending_parameter.uncompiled(self._reader.resume)

    _go_on._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _finish_first(self, *_: object) -> None:
        self.finish()

    def _hook_module(self, module: torch.nn.Module, wanted: list[torch.nn.Parameter]) -> None:
        def before_forward(*_: object) -> None:
            pending_parameter.uncompiled(come)

        def come() -> None:
            handle.remove()
            entries = [self._of_parameter[id(p)][1] for p in wanted if id(p) in self._of_parameter]
            if entries:
                self._wait(self._pieces.chunks_of(entries))  # together, not one by one
                for parameter in wanted:
                    pending_parameter.wait(parameter)

        before_forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiler runs it, and looks away
        handle: RemovableHandle = module.register_forward_pre_hook(before_forward)
        self._hooks.append(handle)


def refuse_compiled(components: Mapping[str, Any]) -> None:
    for name, component in components.items():
        if isinstance(component, torch.nn.Module) and is_compiled(component):
            raise CheckpointError(
                f"{name} is compiled, and a compiled model cannot wait for single parameters: "
                "restore(lazy=True) before torch.compile, or restore() without lazy"
            )


def _comes_late(component: Any) -> bool:
    """Whether it can be given its groups first, and its state when it steps."""
    return isinstance(component, torch.optim.Optimizer) and loads_as_torch(component)


def _used_by(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Its own; and its children's, if it is one of torch's, which use them without running the children."""
    composite = type(module).__module__.startswith(TORCH_NN) and not isinstance(module, _CONTAINERS)
    return list(module.parameters(recurse=composite))
