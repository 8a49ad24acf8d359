"""What a checkpointer is given, and what it takes from the environment: checked, and the same on every rank."""

from __future__ import annotations

import dataclasses
import operator
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
from deepvm.checkpoint.save.store_transfer import PlainTransfer
from deepvm.checkpoint.state.own_state import check_state
from deepvm.checkpoint.state.owners import inner_optimizer
from deepvm.checkpoint.state.skeleton import Tensors, flatten
from deepvm.checkpoint.state.tensor_kinds import check_whole
from deepvm.errors import CheckpointError, UsageError
from deepvm.policy import SavePolicy
from deepvm.store.base import MOST_STEP, Store

CALL = ranks.CREATING


@dataclass(frozen=True, kw_only=True)
class Given:
    run: str
    policy: SavePolicy
    stores: tuple[Store, ...]
    events: str | None
    notice_file: str | None
    session: str  # a name for this start of the job: rank 0's
    expects_notices: bool  # whether some rank's machine may be announced its end
    group: ranks.Meetings | None = None  # where ranks meet

    def transfer(self, rank: int, world_size: int) -> MemoryTransfer | PlainTransfer:
        """The way into the first store."""
        first = self.stores[0]
        nodes = first.memory_nodes()
        if nodes is None:
            return PlainTransfer(first, self.run, rank, world_size)
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
) -> Given:
    """Raises on every rank where one of them was given something that cannot be."""

    def look() -> Given:
        check_savable(state)
        stores = environment.resolve_stores(store, token=token, key=key)
        nodes = stores[0].memory_nodes()
        notice_file = environment.env_value(variables.NOTICE_FILE)
        return Given(
            run=environment.resolve_run(run),
            policy=environment.resolve_policy(policy),
            stores=stores,
            events=environment.env_value(variables.EVENTS),
            notice_file=notice_file,
            session=nodes.session if nodes is not None else "",
            expects_notices=notice_file is not None,
        )

    def tell(given: Given) -> list[Any]:
        return [kinds(state), given.session, given.expects_notices]

    group = ranks.join()
    try:
        given, rows = ranks.agree(CALL, look, tell=tell, deadline_s=ranks.START_S)
        _compare([row[0] for row in rows])
    except BaseException:
        if group is not None:
            group.leave("it could not make its Checkpointer")
        raise
    expects_notices = any(row[2] for row in rows)
    return dataclasses.replace(given, group=group, session=rows[0][1], expects_notices=expects_notices)


def check_savable(state: Mapping[str, Any]) -> None:
    """That all of it can be saved, as far as that can be told before there is anything to save."""
    check_state(state)
    _check_whole(state)
    for name, component in state.items():
        if isinstance(component, DataLoader) and hasattr(component, "state_dict") and not keeps_position(component):
            raise UsageError(f"state {name!r} is {without_position(component)}")
        if hasattr(component, "state_dict"):
            continue  # asked for it when it is saved: it may cost much, or change something
        try:
            flatten(component, name, Tensors())
        except CheckpointError as error:
            raise UsageError(str(error)) from None


def _check_whole(state: Mapping[str, Any]) -> None:
    """That each rank has all of every tensor, and not a part, as with FSDP."""
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
    """The number of a step, of whatever kind of integer the caller counts with: NumPy's, or a tensor."""
    try:
        found = None if isinstance(step, bool) or _is_bool_tensor(step) else operator.index(step)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or not 0 <= found <= MOST_STEP:
        raise UsageError(f"the step is {step!r:.80}: give a whole number from 0 to {MOST_STEP}")
    return found


def _is_bool_tensor(step: Any) -> bool:
    return isinstance(step, torch.Tensor) and step.dtype is torch.bool


def _compare(found: Sequence[Mapping[str, str]]) -> None:
    """That every rank has the components of rank 0."""
    for rank, others in enumerate(found):
        for name in sorted(found[0].keys() | others.keys()):
            here, there = found[0].get(name, "missing"), others.get(name, "missing")
            if here != there:
                raise UsageError(
                    f"the state's {name!r} is {here} on rank 0 and {there} on rank {rank}: give every rank the same "
                    "components"
                )
