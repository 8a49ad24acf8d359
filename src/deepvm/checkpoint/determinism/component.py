"""Generators, environment and kinds of state <-> a component that every checkpoint holds.

After a restore it sets the generators, and returns the reasons why the run would drift.
"""

from __future__ import annotations

import gc
import logging
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from deepvm.checkpoint.determinism import rng_state, run_environment
from deepvm.checkpoint.determinism.draws import Draws
from deepvm.checkpoint.determinism.first_iterator import FirstIterators, is_loader
from deepvm.checkpoint.determinism.untracked import Untracked
from deepvm.checkpoint.state.owners import inner_optimizer
from deepvm.errors import CheckpointError, Corrupt

log = logging.getLogger("deepvm.checkpoint")

DETERMINISM = "deepvm.determinism"  # its name among the components of a state
VERSION = 1
_SAVED = {"rank": int, "pieces": dict, "circumstances": dict, "generators": dict}


class Determinism:
    def __init__(
        self, state: Mapping[str, Any], rank: int, world_size: int, positions: Mapping[str, str] | None = None
    ) -> None:
        """``positions`` are loaders whose position is kept elsewhere, and where."""
        self._state, self._rank, self._world_size = state, rank, world_size
        self._positions = dict(positions or {})
        self._untracked, self._draws = Untracked(state), Draws(state)
        self._logged: set[str] = set()
        self._captured: dict[str, Any] = {}  # by the last save
        self._saved: Mapping[str, Any] | None = None  # in the checkpoint that was restored
        self._first_iterators = FirstIterators({}, list)
        self._loaders_outside: int | None = None

    # --- saving -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        untracked = self._untracked.sentences()
        for sentence in untracked:
            if sentence not in self._logged:
                self._logged.add(sentence)
                log.warning("%s: give it to the Checkpointer", sentence)
        captured: dict[str, Any] = {
            "version": VERSION,
            "rank": self._rank,
            "pieces": kinds(self._state),
            "circumstances": run_environment.take(self._world_size),
            "generators": rng_state.take(),
            "forgotten": untracked,
            "draws": self._draws.typical(),
        }
        names = rng_state.names(captured["generators"])  # not their state, which would stay on the trainer's heap
        self._captured = {**captured, "generators": names}
        return captured

    def facts(self) -> dict[str, Any]:
        """Return what the last save captured, as people read it in the manifest. For the sending thread."""
        captured = self._captured
        pieces = captured["pieces"]
        if self._loaders_outside is None:  # once: it visits every object of the process
            elsewhere = self._positions or "loader" in pieces.values()
            self._loaders_outside = 0 if elsewhere else _count_loaders()
        return {
            **captured["circumstances"],
            "state": sorted(pieces),
            "loaders": [name for name, kind in pieces.items() if kind == "loader"],
            "loaders_outside": self._loaders_outside,
            "positions": self._positions,
            "generators": captured["generators"],
        }

    # --- restoring ----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget the last restore: the next checkpoint may have nothing for this component."""
        self._saved = None
        self.settle()

    def check_state_dict(self, saved: Any) -> None:
        if isinstance(saved, Mapping) and saved.get("version") != VERSION:
            return  # ``load_state_dict`` ignores it
        for name, kind in _SAVED.items():
            if not isinstance(saved, Mapping) or not isinstance(saved.get(name), kind):
                raise Corrupt(f"the saved generators and environment cannot be read: {name} is not a {kind.__name__}")
        for name, texts in (("forgotten", saved), ("devices", saved["circumstances"])):
            found = texts.get(name, [])
            if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
                raise Corrupt(f"the saved generators and environment cannot be read: {name} is not a list of texts")

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.check_state_dict(saved)
        self._saved = saved if saved.get("version") == VERSION else None

    def resume(self, facts: Mapping[str, Any]) -> tuple[str, ...]:
        """Set the generators, once everything else is loaded. Returns the reasons why this run would drift."""
        if self._saved is None:
            return ("the checkpoint has no random generators: it was saved by another version of deepvm",)
        before = self._saved["circumstances"]
        had_cuda = any(str(device).startswith("cuda") for device in before.get("devices", ()))
        now = run_environment.take(self._world_size, with_cuda=had_cuda and torch.cuda.is_available())
        reasons = run_environment.differences(before, now)
        reasons += _missing(self._saved["pieces"], kinds(self._state), {} if self._positions else facts)
        reasons += self._saved.get("forgotten", [])
        reasons += self._put()
        typical = self._saved.get("draws")
        self._draws.restored(typical if isinstance(typical, Mapping) else {})
        self._first_iterators = FirstIterators(self._state, self._put)
        return tuple(reasons)

    def stepped(self) -> list[str]:
        """Return why the step that has just finished has drifted from the restored run."""
        return self._draws.stepped()

    def close(self) -> None:
        self._untracked.close()

    def restore_generators(self) -> None:
        if self._saved is None:
            raise CheckpointError("no generators were restored: restore() a checkpoint that has them first")
        self._put()

    def settle(self) -> None:
        """Treat iterators that are created from now on as new: training continues."""
        self._first_iterators.unhook()

    def _put(self) -> list[str]:
        assert self._saved is not None  # noqa: S101 - callers check it
        saved, of_rank = self._saved["generators"], self._saved["rank"]
        try:
            if of_rank == self._rank:
                return rng_state.put(saved)
            rng_state.derive(saved, self._rank)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
            return [f"the saved random generators cannot be set: {type(error).__name__} {error}"]
        return [f"rank {self._rank} has no generators in the checkpoint: they are seeded from those of rank {of_rank}"]


def kinds(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of each component of a state."""
    return {name: _kind(component) for name, component in state.items()}


def _kind(component: Any) -> str:
    if isinstance(component, torch.nn.Module):
        return "module"
    if inner_optimizer(component) is not None:
        return "optimizer"
    if isinstance(component, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    if isinstance(component, torch.amp.GradScaler):
        return "scaler"
    return "loader" if is_loader(component) else "values"


def _missing(saved: Mapping[str, str], now: Mapping[str, str], facts: Mapping[str, Any]) -> list[str]:
    reasons = [
        f"the checkpoint has the state of {name} ({kind}), which the Checkpointer does not have: it begins anew"
        for name, kind in saved.items()
        if name not in now
    ]
    if facts.get("loaders_outside") and "loader" not in saved.values():
        reasons.append(
            "a DataLoader was in use, whose position is not in the checkpoint: if training reads from it, its data "
            'begins anew; give deepvm.resumable(loader), or positions={"loader": "kept by ..."} if it is kept elsewhere'
        )
    return reasons


def _count_loaders() -> int:
    """Count the DataLoaders of this process."""
    classes: list[Any] = [DataLoader]
    for known in classes:  # it grows during the loop
        classes += [sub for sub in known.__subclasses__() if sub not in classes]
    loaders = set(classes)
    return sum(type(found) in loaders for found in gc.get_referrers(*classes))  # one walk over the heap for all classes
