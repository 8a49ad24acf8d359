"""Train deep networks on spot machines without losing work or money.

Everything that the command line does is one call; names are loaded when they are first used, so that
``import deepvm`` stays cheap.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# For the timeline of a start: by when torch had been imported, if that was before this. Nobody could tell later.
torch_seen_s = (
    time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) if "torch" in sys.modules else None
)

_LAZY = {
    "Checkpointer": "deepvm.checkpoint",
    "ResumableSampler": "deepvm.checkpoint",
    "resumable": "deepvm.checkpoint",
    "share_of_batch": "deepvm.checkpoint",
    "Request": "deepvm.plan",
    "load_catalog": "deepvm.catalog.library:load",
    "load_catalogs": "deepvm.catalog.library:load_all",
    "make_plan": "deepvm.plan:plan",
    "sweep": "deepvm.plan",
    "explain": "deepvm.plan",
    "pareto": "deepvm.plan",
    "reproduce": "deepvm.paper",
}

# Packages that are attributes without an import of their own: ``deepvm.checkpoint.deterministic(7)``.
_ROOMS = ("catalog", "checkpoint", "fetch", "memnode", "paper", "performance", "plan", "policy", "runtime", "store")

if TYPE_CHECKING:
    from deepvm.catalog.library import load as load_catalog
    from deepvm.catalog.library import load_all as load_catalogs
    from deepvm.checkpoint import Checkpointer, ResumableSampler, resumable, share_of_batch
    from deepvm.paper.reproduce import reproduce
    from deepvm.plan.explain import explain
    from deepvm.plan.pareto import pareto
    from deepvm.plan.planner import plan as make_plan
    from deepvm.plan.request import Request
    from deepvm.plan.sweep import sweep

__all__ = [
    "Checkpointer",
    "Request",
    "ResumableSampler",
    "__version__",
    "explain",
    "load_catalog",
    "load_catalogs",
    "make_plan",
    "pareto",
    "reproduce",
    "resumable",
    "share_of_batch",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY and name not in _ROOMS:
        raise AttributeError(f"module 'deepvm' has no attribute {name!r}")
    module, _, attribute = _LAZY.get(name, "").partition(":")
    try:
        if name in _ROOMS:
            return importlib.import_module(f"deepvm.{name}")
        value = getattr(importlib.import_module(module), attribute or name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from deepvm.errors import MissingExtra

        raise MissingExtra(f"deepvm.{name}", "train") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not, and the rooms that were imported."""
    hidden = ("importlib", "sys", "time", "annotations", "Any", "TYPE_CHECKING", "torch_seen_s")
    return sorted({*__all__, *globals()}.difference(hidden))
