"""A checkpointer's arguments and environment -> its settings, checked and the same on every rank."""

from __future__ import annotations

import dataclasses
import json
import operator
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from deepvm import variables
from deepvm.checkpoint import environment, ranks
from deepvm.checkpoint.data.loader import keeps_position, without_position
from deepvm.checkpoint.determinism.component import kinds
from deepvm.checkpoint.save.memory_transfer import MemoryTransfer
from deepvm.checkpoint.save.store_transfer import StoreTransfer
from deepvm.checkpoint.state.own_state import check_state
from deepvm.checkpoint.state.owners import inner_optimizer
from deepvm.checkpoint.state.skeleton import Tensors, flatten
from deepvm.checkpoint.state.tensor_kinds import check_whole
from deepvm.errors import CheckpointError, UsageError
from deepvm.policy import SavePolicy
from deepvm.store.base import MOST_STEP, Store
from deepvm.store.state_check import check_text


@dataclass(frozen=True, kw_only=True)
class Setup:
    run: str
    policy: SavePolicy
    stores: tuple[Store, ...]
    events: str | None
    notice_file: str | None
    session: str  # of this start of the job: rank 0's
    expects_notices: bool = False  # the preemption of some rank's machine may be announced
    group: ranks.Meetings | None = None  # where ranks meet

    def transfer(self, rank: int, world_size: int) -> MemoryTransfer | StoreTransfer:
        """Return what brings saves into the first store."""
        first = self.stores[0]
        nodes = first.memory_nodes()
        if nodes is None:
            return StoreTransfer(first, self.run, rank, world_size, self.session)
        nodes.session = self.session
        return MemoryTransfer(nodes, self.run, rank, world_size)


def prepare(
    state: Mapping[str, Any],
    store: str | Sequence[str] | Store | None,
    *,
    run: str | None,
    policy: SavePolicy | str | None,
    token: str | None,
    key: str | None,
) -> Setup:
    """Resolve and check the settings. Raises on every rank if one of them has an invalid value."""

    def resolve() -> Setup:
        check_savable(state)
        stores = environment.resolve_stores(store, token=token, key=key)
        nodes = stores[0].memory_nodes()
        return Setup(
            run=environment.resolve_run(run),
            policy=environment.resolve_policy(policy),
            stores=stores,
            events=environment.env_value(variables.EVENTS),
            notice_file=environment.env_value(variables.NOTICE_FILE),
            session=nodes.session if nodes is not None else secrets.token_hex(8),
        )

    def report(setup: Setup) -> list[Any]:
        return [kinds(state), setup.session, setup.notice_file is not None]

    group = ranks.join()
    try:
        setup, rows = ranks.agree(ranks.CREATING, resolve, report=report, deadline_s=ranks.START_S)
        _compare([row[0] for row in rows])
    except BaseException:
        if group is not None:
            group.leave("it could not make its Checkpointer")
        raise
    expects_notices = any(row[2] for row in rows)
    return dataclasses.replace(setup, group=group, session=rows[0][1], expects_notices=expects_notices)


def check_savable(state: Mapping[str, Any]) -> None:
    """Check that all of it can be saved, as far as that is known before the first save."""
    check_state(state)
    _check_whole(state)
    for name, component in state.items():
        if isinstance(component, DataLoader) and hasattr(component, "state_dict") and not keeps_position(component):
            raise UsageError(f"state {name!r} is {without_position(component)}")
        if hasattr(component, "state_dict"):
            continue  # called when it is saved: it may be expensive, or have side effects
        try:
            check_text(json.dumps(flatten(component, name, Tensors())).encode())
        except CheckpointError as error:
            raise UsageError(str(error)) from None
        except ValueError as error:  # MalformedJson, or an integer of more digits than Python prints
            raise UsageError(f"state {name!r} could not be restored: {error}") from None
        except RecursionError:
            raise UsageError(f"state {name!r} is nested too deep to be saved: store it flat") from None


def _check_whole(state: Mapping[str, Any]) -> None:
    """Check that each rank has all of every tensor, and not a part, as with FSDP."""
    for name, part in state.items():
        optimizer = inner_optimizer(part)
        if isinstance(part, torch.nn.Module):
            named = ((f"{name}.{key}", tensor) for key, tensor in chain(part.named_parameters(), part.named_buffers()))
        elif optimizer is not None:
            named = ((f"a parameter of {name}", p) for group in optimizer.param_groups for p in group["params"])
        else:
            continue
        try:
            for key, tensor in named:
                check_whole(key, tensor)
        except CheckpointError as error:
            raise UsageError(str(error)) from None


def whole_step(step: Any) -> int:
    """Return a step as an int, whatever integer type it has: NumPy's, or a tensor."""
    boolean = isinstance(step, bool) or (isinstance(step, torch.Tensor) and step.dtype is torch.bool)
    try:
        found = -1 if boolean else operator.index(step)
    except (TypeError, ValueError, RuntimeError):
        found = -1
    if not 0 <= found <= MOST_STEP:
        raise UsageError(f"the step is {step!r:.80}: pass a whole number from 0 to {MOST_STEP}")
    return found


def _compare(found: Sequence[Mapping[str, str]]) -> None:
    """Check that every rank has the components of rank 0."""
    for rank, others in enumerate(found):
        for name in sorted(found[0].keys() | others.keys()):
            first, other = found[0].get(name, "missing"), others.get(name, "missing")
            if first != other:
                raise UsageError(
                    f"the state's {name!r} is {first} on rank 0 and {other} on rank {rank}: give every rank the same "
                    "components"
                )
