"""Names of a module's tensors without the prefixes of wrappers: ``module.`` of DDP and DataParallel, ``_orig_mod.`` of
torch.compile. A checkpoint has the names without them; a restore matches them with the names of the live module."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

_ATTRIBUTES = ("module", "_orig_mod")


def without_wrappers(module: torch.nn.Module, state: Any) -> Any:
    """Return a module's state_dict with the names that it has without wrappers, its own and those within it."""
    if not isinstance(state, Mapping):
        return state
    names = clean_names(module, state)
    if names is None:
        return state
    found = OrderedDict((names[key], value) for key, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        paths = clean_names(module, versions) or {}
        found._metadata = OrderedDict((paths.get(path, path), v) for path, v in versions.items())  # type: ignore[attr-defined]
    return found


def clean_names(module: torch.nn.Module, names: Collection[Any]) -> dict[str, str] | None:
    """Map names of tensors or modules within a module to those without wrappers; None if it has no wrappers."""
    wrapped = sorted(_wrapped_paths(module), key=len, reverse=True)  # the innermost first
    if not wrapped or not all(isinstance(name, str) for name in names):
        return None
    found = {}
    for name in names:
        clean = name + "."
        for path in wrapped:
            if clean.startswith(path):
                clean = path[: path.rfind(".", 0, -1) + 1] + clean[len(path) :]
        found[name] = clean[:-1]
    return found if len(set(found.values())) == len(found) or "" in names else None


def _wrapped_paths(module: torch.nn.Module) -> Iterator[str]:
    """Yield the paths at which wrappers keep what they wrap, each with a dot behind it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported for this: it takes a second
    compiled = (dynamo.OptimizedModule,) if dynamo is not None else ()
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, compiled):
            yield f"{path}{'.' if path else ''}_orig_mod."
        elif isinstance(part, DistributedDataParallel | DataParallel):
            yield f"{path}{'.' if path else ''}module."


def matched(module: torch.nn.Module, own: Collection[str], saved: Collection[str]) -> dict[str, str]:
    """Map the names of a module's tensors to the saved ones: by the reading of the names that matches most, and of
    equals the one that changes least."""
    clean = clean_names(module, own) or {name: name for name in own}
    readings = [_pairs(clean, {name: name for name in saved})]
    if len(readings[0]) < len(own):
        readings.append(_pairs({name: name for name in own}, {name: name for name in saved}))
        readings += [_pairs(clean, stripped) for stripped in _stripped(saved)]
        readings.append(_pairs(_bare_names(own), _bare_names(saved)))
    return max(readings, key=len)


def _pairs(own: Mapping[str, str], saved: Mapping[str, str]) -> dict[str, str]:
    """Match names that read the same."""
    read = {as_read: name for name, as_read in saved.items()}
    return {name: read[as_read] for name, as_read in own.items() if as_read in read}


def _stripped(saved: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield saved names without prefixes that all of them have: of a model that was saved with its wrapper's."""
    names = {name: name for name in saved}
    while names:
        prefix = next(iter(names.values())).partition(".")[0]
        if prefix not in _ATTRIBUTES or not all(read.startswith(f"{prefix}.") for read in names.values()):
            return
        names = {name: read[len(prefix) + 1 :] for name, read in names.items()}
        yield names


def _bare_names(names: Collection[str]) -> dict[str, str]:
    """Return names without any part that a wrapper may have added, if they are still unique."""
    found = {name: bare(name) for name in names}
    times = Counter(found.values())
    return {name: read for name, read in found.items() if times[read] == 1}


def bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _ATTRIBUTES)
