"""A checkpoint's skeleton and the live components -> what is restored: the saved state for each component.

``newest`` calls it after reading the header. ``load`` and ``lazy`` get a skeleton of only what is restored, in which
modules' tensors have their live names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepvm.checkpoint.restore.parameters import loads_itself
from deepvm.checkpoint.restore.tensor_views import TensorViews
from deepvm.checkpoint.state.documents import module_rows
from deepvm.checkpoint.state.fill import wrapper_problem
from deepvm.checkpoint.state.optimizer_state import check_form, check_kinds, loads_as_torch
from deepvm.checkpoint.state.skeleton import RESERVED, is_tensor_row
from deepvm.checkpoint.state.tensor_kinds import check_fillable, is_wrapper
from deepvm.checkpoint.state.unwrapping import clean_names, matched
from deepvm.errors import CheckpointError, Corrupt, UsageError, listed
from deepvm.store.state_check import is_items
from deepvm.strict_json import brief


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to restore: names of components, or of modules' tensors, or prefixes of these up to a dot. ``strict``: all
    of it must be in the checkpoint."""

    strict: bool = True
    only: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        for option, names in (("only", self.only), ("exclude", self.exclude)):
            if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
                raise UsageError(f'{option} is a list of names, such as {option}=("optimizer",); not {names!r}')

    def takes(self, name: str) -> bool:
        """True if something within the name is wanted."""
        asked = not self.only or any(_within(name, one) or _within(one, name) for one in self.only)
        return asked and not any(_within(name, one) for one in self.exclude)

    def check_known(self, names: Iterable[str]) -> None:
        """Reject unknown names: a misspelled one would load what was to be left out."""
        known = list(names)
        for option, asked in (("only", self.only), ("exclude", self.exclude)):
            for one in asked:
                if not any(_within(name, one) for name in known):
                    components = ", ".join(sorted({name.partition(".")[0] for name in known}))
                    raise UsageError(
                        f"{option} names {one!r}, which neither the state nor the checkpoint has: name one of "
                        f"{components}, or tensors of a module"
                    )


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


@dataclass
class Selection:
    components: dict[str, Any] = field(default_factory=dict)  # those that have a saved state
    skeleton: dict[str, Any] = field(default_factory=dict)  # of what is restored
    own: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # of modules: the live state by its names
    missing: list[str] = field(default_factory=list)  # wanted, and not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint, and not in the live state
    skipped: list[str] = field(default_factory=list)  # not wanted


def select(components: Mapping[str, Any], skeleton: Mapping[str, Any], saved: TensorViews, wanted: Wanted) -> Selection:
    """Raises CheckpointError if the checkpoint does not fit these components."""
    return _Selector(components, skeleton, saved, wanted).select()


class _Selector:
    def __init__(
        self, components: Mapping[str, Any], skeleton: Mapping[str, Any], saved: TensorViews, wanted: Wanted
    ) -> None:
        self._components, self._skeleton, self._saved, self._wanted = components, skeleton, saved, wanted
        self._found = Selection()
        self._model_problems: list[str] = []
        self._optimizer_problems: list[str] = []
        self._known = {name for name in (*components, *skeleton) if not name.startswith(RESERVED)}

    def select(self) -> Selection:
        found, wanted = self._found, self._wanted
        for name, component in self._components.items():
            reserved = name.startswith(RESERVED)
            if not reserved and not wanted.takes(name):
                found.skipped.append(name)
            elif name in self._skeleton:
                try:
                    found.skeleton[name] = self._select_one(name, component, self._skeleton[name])
                except (KeyError, TypeError, AttributeError) as error:
                    problem = f"{type(error).__name__} {error}"
                    raise Corrupt(f"the saved state of {name} cannot be read: {problem}") from error
                found.components[name] = component
            elif not reserved:
                found.missing.append(name)
        for name in self._skeleton:
            if name not in self._components and not name.startswith(RESERVED):
                (found.unexpected if wanted.takes(name) else found.skipped).append(name)
        wanted.check_known(self._known)
        self._raise_problems()
        return found

    def _select_one(self, name: str, component: Any, row: Any) -> Any:
        if isinstance(component, torch.nn.Module):
            return self._select_module(name, component, row)
        if isinstance(component, torch.optim.Optimizer):
            return self._select_optimizer(name, component, row)
        if isinstance(component, torch.Tensor):
            self._compare_tensor(name, component, row)
        return row

    def _raise_problems(self) -> None:
        if self._model_problems:
            raise CheckpointError(f"the checkpoint is of another model: {listed(self._model_problems)}")
        if self._wanted.strict:
            found, skeleton = self._found, self._skeleton
            absent = sorted(name for name in found.missing if name in self._components)
            if absent:
                saved = ", ".join(sorted(name for name in skeleton if not name.startswith(RESERVED)))
                raise CheckpointError(
                    f"the checkpoint has no state of {', '.join(absent)}; it has {saved}: restore(strict=False) loads "
                    "what there is"
                )
            inner = [f"{name} is not in the checkpoint" for name in found.missing]
            inner += [f"{name} is not in the model" for name in found.unexpected if name not in skeleton]
            if inner:
                raise CheckpointError(
                    f"the checkpoint is of another model: {listed(inner)}; restore(strict=False) loads what both have"
                )
        if self._optimizer_problems:  # last: a problem of the model is one of its optimizer too, and says more
            raise CheckpointError(f"the checkpoint is of another optimizer: {listed(self._optimizer_problems)}")

    def _select_module(self, name: str, module: torch.nn.Module, row: Any) -> Any:
        """Return the module's part of the skeleton, by the names of its live tensors."""
        found = self._found
        own = found.own[name] = module.state_dict(keep_vars=True)
        rows, versions = _module_rows(name, row)
        same = own.keys() == rows.keys()
        names = dict(zip(own, own, strict=True)) if same else matched(module, own.keys(), rows.keys())
        unwrapped = clean_names(module, own.keys()) or {}

        def shown(key: str) -> str:
            return f"{name}.{unwrapped.get(key, key)}"

        skipped: set[str] = set()  # live names
        skipped_saved: set[str | None] = set()
        if self._wanted.only or self._wanted.exclude:
            self._known |= {*map(shown, own), *(f"{name}.{key}" for key in rows)}
            skipped = {key for key in own if not self._wanted.takes(shown(key))}
            skipped_saved = {names.pop(key, None) for key in skipped}
            rest = rows.keys() - names.values()
            skipped_saved |= {key for key in rest if not self._wanted.takes(f"{name}.{key}")}
            found.skipped += [shown(key) for key in own if key in skipped]
            found.skipped += [f"{name}.{key}" for key in rows if key in skipped_saved and key not in skipped]
        if len(names) + len(skipped) < len(own):
            found.missing += [shown(key) for key in own if key not in names and key not in skipped]
        if len(names) < len(rows):
            more = rows.keys() - names.values() - skipped_saved
            found.unexpected += [f"{name}.{key}" for key in rows if key in more]
        for key, saved_key in names.items():
            self._compare_tensor(f"{name}.{key}", own[key], rows[saved_key], sized=not loads_itself(module, key))
        selected = {key: rows[saved_key] for key, saved_key in names.items()}
        if "$module" not in row and not any(key.startswith("$") for key in selected):
            return selected
        if names.keys() != rows.keys():
            paths = {key.rpartition(".")[0]: saved_key.rpartition(".")[0] for key, saved_key in names.items()}
            versions = {path: versions[saved_path] for path, saved_path in paths.items() if saved_path in versions}
        return {"$module": selected, "versions": versions}

    def _compare_tensor(self, name: str, live: Any, row: Any, *, sized: bool = True) -> None:
        """Record why a live tensor cannot take the saved one's content: it is of another size, if that is ``sized``."""
        if not isinstance(live, torch.Tensor):
            return
        check_fillable(name, live)
        if not is_tensor_row(row):
            raise Corrupt(f"{name} is a tensor, but the checkpoint has a plain value")
        if is_wrapper(live) or "$wrapper" in row:
            problem = wrapper_problem(name, live, row, self._saved)
            self._model_problems += [] if problem is None else [problem]
        elif "$tensor" in row and not torch.nn.parameter.is_lazy(live):
            shape = self._saved.shape(row["$tensor"])
            if str(row.get("real", "")).startswith("complex"):
                shape = shape[:-1]
            if sized and tuple(live.shape) != shape:
                self._model_problems.append(f"{name} is {tuple(live.shape)}, saved {shape}")

    def _select_optimizer(self, name: str, optimizer: torch.optim.Optimizer, row: Any) -> Any:
        if loads_as_torch(optimizer):
            check_form(name, row)
            check_kinds(name, optimizer, row)
        groups = row.get("param_groups") if isinstance(row, dict) else None
        if not isinstance(groups, list):
            return row  # this optimizer's state has another form
        mine, theirs = ([len(group["params"]) for group in each] for each in (optimizer.param_groups, groups))
        if mine != theirs:
            self._optimizer_problems.append(
                f'{name} has groups of {mine} parameters, saved {theirs}: restore(exclude=("{name}",)) leaves it as it '
                "is"
            )
            return row
        own = [group.get("param_names") for group in optimizer.param_groups]
        if not any(own):
            return row
        renamed = [
            group if names is None else {**group, "param_names": list(names)}
            for group, names in zip(groups, own, strict=True)
        ]
        return {**row, "param_groups": renamed}


def _module_rows(name: str, row: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the saved tensors of a module and the versions of its parts, checked."""
    if isinstance(row, dict):
        row = row.get("$ordered", row)  # of a module with a state_dict of its own
    rows = module_rows(row)
    versions = row.get("versions", {}) if "$module" in row else {}
    tagged = "$module" not in row and not is_items(row) and any(key.startswith("$") for key in rows)
    if not isinstance(versions, dict) or tagged:
        raise Corrupt(f"the saved state of {name} is not that of a module")
    for one in versions.values():
        if not isinstance(one, dict) or type(one.get("version")) not in (int, type(None)):
            raise Corrupt(f"the saved versions of {name} are {brief(versions)}, not one for each of its modules")
    return rows, versions
