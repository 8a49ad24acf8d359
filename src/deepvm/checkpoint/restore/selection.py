"""Which saved state is for which live component: what a checkpoint's skeleton and the state here have in common.

Comes between reading a checkpoint's header (select.py) and loading it (load.py, lazy.py). Those see a skeleton
of what is to be loaded alone, in which modules' tensors have the names that they have here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from deepvm.checkpoint.state.fill import wrapper_problem
from deepvm.checkpoint.state.optimizer_state import check_form, loads_as_torch
from deepvm.checkpoint.state.skeleton import RESERVED
from deepvm.checkpoint.state.tensor_kinds import check_fillable, is_wrapper
from deepvm.checkpoint.state.unwrapping import clean_names, matched
from deepvm.errors import CheckpointError, Corrupt, UsageError
from deepvm.strict_json import brief

NAMED = 8  # problems that an error names


class Saved(Protocol):
    """The tensors of a checkpoint, and their shapes."""

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a checkpoint is asked for: names of components, or of modules' tensors and their beginnings up to a dot.
    ``strict``: everything that is asked for has to be there."""

    strict: bool = True
    only: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        for option, names in (("only", self.only), ("exclude", self.exclude)):
            if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
                raise UsageError(f'{option} is a list of names, such as {option}=("optimizer",); not {names!r}')

    def takes(self, name: str) -> bool:
        """True if something within the name is asked for."""
        asked = not self.only or any(_within(name, one) or _within(one, name) for one in self.only)
        return asked and not any(_within(name, one) for one in self.exclude)

    def check_known(self, names: Iterable[str]) -> None:
        """Refuse what nothing answers to: a typing error would load what was to be left out."""
        known = list(names)
        for option, asked in (("only", self.only), ("exclude", self.exclude)):
            for one in asked:
                if not any(_within(name, one) for name in known):
                    whole = ", ".join(sorted({name.partition(".")[0] for name in known}))
                    raise UsageError(
                        f"{option} names {one!r}, which neither the state nor the checkpoint has: name one of {whole}, "
                        "or tensors of a module"
                    )


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


@dataclass
class Selection:
    components: dict[str, Any] = field(default_factory=dict)  # those for which something is saved
    skeleton: dict[str, Any] = field(default_factory=dict)  # of what is loaded
    own: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # of modules: the live state by its names
    missing: list[str] = field(default_factory=list)  # asked for, and not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint, and not here
    skipped: list[str] = field(default_factory=list)  # left out, as was asked for


def select(components: Mapping[str, Any], skeleton: Mapping[str, Any], saved: Saved, wanted: Wanted) -> Selection:
    """Raises CheckpointError where the checkpoint is not of these components."""
    found = Selection()
    problems: list[str] = []
    others: list[str] = []
    known = {name for name in (*components, *skeleton) if not name.startswith(RESERVED)}
    for name, component in components.items():
        ours = name.startswith(RESERVED)
        if not ours and not wanted.takes(name):
            found.skipped.append(name)
        elif name not in skeleton:
            found.missing += [] if ours else [name]
        else:
            row = skeleton[name]
            try:
                if isinstance(component, torch.nn.Module):
                    row = _select_module(name, component, row, saved, wanted, found, problems, known)
                elif isinstance(component, torch.optim.Optimizer):
                    row = _select_optimizer(name, component, row, others)
                elif isinstance(component, torch.Tensor):
                    problems += _tensor_problems(name, component, row, saved)
            except (KeyError, TypeError, AttributeError) as error:
                raise Corrupt(f"the saved state of {name} cannot be read: {type(error).__name__} {error}") from error
            found.components[name], found.skeleton[name] = component, row
    absent = [name for name in skeleton if name not in components and not name.startswith(RESERVED)]
    found.unexpected += [name for name in absent if wanted.takes(name)]
    found.skipped += [name for name in absent if not wanted.takes(name)]
    wanted.check_known(known)
    _raise_problems(problems, found, components, skeleton, wanted)
    if others:  # what is wrong with the model is wrong with its optimizer, and says more
        raise CheckpointError(f"the checkpoint is of another optimizer: {listed(others)}")
    return found


def _raise_problems(
    problems: list[str],
    found: Selection,
    components: Mapping[str, Any],
    skeleton: Mapping[str, Any],
    wanted: Wanted,
) -> None:
    if problems:
        raise CheckpointError(f"the checkpoint is of another model: {listed(problems)}")
    if not wanted.strict:
        return
    whole = [name for name in found.missing if name in components]
    if whole:
        saved = ", ".join(sorted(name for name in skeleton if not name.startswith(RESERVED)))
        raise CheckpointError(
            f"the checkpoint has no state of {', '.join(sorted(whole))}; it has {saved}: restore(strict=False) loads "
            "what there is"
        )
    inner = [f"{name} is not in the checkpoint" for name in found.missing]
    inner += [f"{name} is not in the model" for name in found.unexpected if name not in skeleton]
    if inner:
        raise CheckpointError(
            f"the checkpoint is of another model: {listed(inner)}; restore(strict=False) loads what both have"
        )


def listed(names: Sequence[str]) -> str:
    """Several things in one sentence, of bounded length."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return "; ".join(names[:NAMED]) + more


# --- modules --------------------------------------------------------------------------------------------------------


def _select_module(
    name: str,
    module: torch.nn.Module,
    row: Any,
    saved: Saved,
    wanted: Wanted,
    found: Selection,
    problems: list[str],
    known: set[str],
) -> Any:
    """The module's part of a skeleton, by the names of its own tensors."""
    own = found.own[name] = module.state_dict(keep_vars=True)
    rows = row.get("$module", row) if isinstance(row, dict) else None
    versions = row.get("versions", {}) if isinstance(row, dict) else None
    if not isinstance(rows, dict) or not isinstance(versions, dict) or any(key.startswith("$") for key in rows):
        raise Corrupt(f"the saved state of {name} is not that of a module")
    if not all(isinstance(one, dict) and _is_version(one.get("version")) for one in versions.values()):
        raise Corrupt(f"the saved versions of {name} are {brief(versions)}, not one for each of its modules")
    names = dict(zip(own, own, strict=True)) if own.keys() == rows.keys() else matched(module, own.keys(), rows.keys())
    clean = clean_names(module, own.keys()) or {}
    if wanted.only or wanted.exclude:
        known |= {f"{name}.{clean.get(key, key)}" for key in own} | {f"{name}.{key}" for key in rows}
        left = [key for key in own if not wanted.takes(f"{name}.{clean.get(key, key)}")]
        left_there = {names.pop(key, None) for key in left}
        rest = rows.keys() - names.values()
        left_there |= {key for key in rest if not wanted.takes(f"{name}.{key}")}
        found.skipped += [f"{name}.{clean.get(key, key)}" for key in left]
        found.skipped += [f"{name}.{key}" for key in rows if key in left_there and key not in left]
    else:
        left, left_there = [], set()
    if len(names) + len(left) < len(own):
        gone = own.keys() - names.keys() - set(left)
        found.missing += [f"{name}.{clean.get(key, key)}" for key in own if key in gone]
    if len(names) < len(rows):
        more = rows.keys() - names.values() - left_there
        found.unexpected += [f"{name}.{key}" for key in rows if key in more]
    for key, there in names.items():
        problems += _tensor_problems(f"{name}.{key}", own[key], rows[there], saved)
    if "$module" not in row:
        return {key: rows[there] for key, there in names.items()}
    if names.keys() != rows.keys():
        versions = _versions(names, versions)
    return {"$module": {key: rows[there] for key, there in names.items()}, "versions": versions}


def _is_version(version: Any) -> bool:
    return version is None or type(version) is int


def _versions(names: Mapping[str, str], versions: Mapping[str, Any]) -> dict[str, Any]:
    """The versions of saved modules, by the paths of those here."""
    paths = {key.rpartition(".")[0]: there.rpartition(".")[0] for key, there in names.items()}
    return {path: versions[there] for path, there in paths.items() if there in versions}


def _tensor_problems(name: str, live: Any, row: Any, saved: Saved) -> list[str]:
    """Why a live tensor cannot have the saved one's content."""
    if not isinstance(live, torch.Tensor):
        return []
    check_fillable(name, live)
    if not isinstance(row, dict) or ("$tensor" not in row and "$wrapper" not in row and "$inline" not in row):
        raise Corrupt(f"{name} is a tensor, and saved is a plain value")
    if is_wrapper(live) or "$wrapper" in row:
        problem = wrapper_problem(name, live, row, saved)  # type: ignore[arg-type]
        return [] if problem is None else [problem]
    if torch.nn.parameter.is_lazy(live) or "$tensor" not in row:
        return []
    shape = saved.shape(row["$tensor"])
    if str(row.get("real", "")).startswith("complex"):
        shape = shape[:-1]
    return [] if tuple(live.shape) == shape else [f"{name} is {tuple(live.shape)}, saved {shape}"]


# --- optimizers -----------------------------------------------------------------------------------------------------


def _select_optimizer(name: str, optimizer: torch.optim.Optimizer, row: Any, problems: list[str]) -> Any:
    if loads_as_torch(optimizer):
        check_form(name, row)
    groups = row.get("param_groups") if isinstance(row, dict) else None
    if not isinstance(groups, list):
        return row  # of a kind that has its own idea of a state
    mine, theirs = ([len(group["params"]) for group in each] for each in (optimizer.param_groups, groups))
    if mine != theirs:
        problems.append(
            f'{name} has groups of {mine} parameters, saved {theirs}: restore(exclude=("{name}",)) leaves it as it is'
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
