"""From a store back into the trainer: the newest whole checkpoint, every chunk verified, nothing half-loaded."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from deepvm.checkpoint import ranks
from deepvm.checkpoint.layout import DTYPES, Layout, read_header
from deepvm.checkpoint.staging import Staging
from deepvm.checkpoint.state import rebuild
from deepvm.errors import CheckpointError, Corrupt, StoreError
from deepvm.store.base import Manifest, Store
from deepvm.store.memory import MemoryStore

log = logging.getLogger("deepvm.checkpoint")

READERS = 4
RESERVED = "deepvm."  # components of our own: a checkpoint may have them, or not


@dataclass(frozen=True, kw_only=True)
class Restored:
    step: int
    store: str
    bytes: int
    seconds: float
    passed_over: tuple[str, ...]  # newer checkpoints that could not be used, and why
    memory: Staging  # that held its bytes, and is free for other use
    facts: Mapping[str, Any] = field(default_factory=dict)  # what its manifest tells of it
    drift: tuple[str, ...] = ()  # why the run will not go on bit for bit
    replayed: bool = False  # its next step was made once more, and was the same

    def __str__(self) -> str:
        skipped = f"; passed over {'; '.join(self.passed_over)}" if self.passed_over else ""
        proven = "; replayed and identical" if self.replayed else ""
        taken = f"{self.bytes} bytes in {self.seconds:.3f} s"
        return f"restored step {self.step} from {self.store}: {taken}{skipped}{proven}"


def restore_newest(stores: Sequence[Store], run: str, components: dict[str, Any], step: int | None) -> Restored | None:
    """Try checkpoints newest first, and each in the nearest store first; the first that is whole is loaded. Ranks load
    the same one, or none: rank 0 says which, and only what every rank could fetch is loaded by any."""
    problems: list[str] = []
    rank, world_size = ranks.rank_and_world_size()
    found = _candidates(stores, run, step, problems) if rank == 0 else []
    while True:
        began = time.perf_counter()
        candidate, nearness = chosen = found.pop(0) if found else (-1, 0)
        if world_size > 1:
            candidate, nearness = chosen = ranks.as_rank_0_says(chosen)
        if candidate < 0:
            break
        store, fetched = stores[nearness], None
        try:
            fetched = _fetch_whole(store, run, candidate)
        except (StoreError, KeyError, ValueError) as error:
            problems.append(f"step {candidate} in {store.url}: {error}")
            log.warning("cannot restore %s", problems[-1])
        if not (fetched is not None if world_size == 1 else ranks.all_of(fetched is not None)):
            if fetched is not None:
                problems.append(f"step {candidate} in {store.url}: another rank cannot read it")
            continue
        assert fetched is not None  # noqa: S101 - it is on every rank
        manifest, memory, layout, skeletons = fetched
        load(components, layout, memory, skeletons[rank % len(skeletons)])
        return Restored(
            step=candidate,
            store=store.url,
            bytes=manifest.size_bytes,
            seconds=time.perf_counter() - began,
            passed_over=tuple(problems),
            memory=memory,
            facts=manifest.facts,
        )
    if problems if world_size == 1 else ranks.any_of(bool(problems)):
        why = "; ".join(problems) or "another rank cannot: its log says why"
        raise CheckpointError(f"no checkpoint of run {run} can be restored: {why}")
    if step is not None:
        raise CheckpointError(f"no store has step {step} of run {run}")
    return None


def _candidates(stores: Sequence[Store], run: str, step: int | None, problems: list[str]) -> list[tuple[int, int]]:
    """Steps and the stores that have them."""
    found: list[tuple[int, int]] = []
    for nearness, store in enumerate(stores):
        try:
            found += [(s, nearness) for s in store.steps(run) if step in (None, s)]
        except StoreError as error:
            problems.append(f"{store.url}: {error}")
            log.warning("cannot look for checkpoints in %s", problems[-1])
    return sorted(found, key=lambda one: (-one[0], one[1]))


def _fetch_whole(store: Store, run: str, step: int) -> tuple[Manifest, Staging, Layout, list[Any]]:
    manifest = store.manifest(run, step)
    memory = fetch(store, manifest)
    layout, metadata = read_header(memory.view)
    return manifest, memory, layout, json.loads(metadata["skeleton"])


def fetch(store: Store, manifest: Manifest) -> Staging:
    """All bytes of a checkpoint, in parallel, verified."""
    memory = Staging(manifest.size_bytes)
    readers = len(store.nodes) * store.connections if isinstance(store, MemoryStore) else READERS

    def read(chunk: int) -> None:
        offset, length = manifest.span(chunk)
        store.read_chunk(manifest, chunk, memory.view[offset : offset + length])

    with ThreadPoolExecutor(max_workers=readers, thread_name_prefix="deepvm-read") as pool:
        for done in pool.map(read, range(len(manifest.digests))):
            del done
    return memory


def load(components: dict[str, Any], layout: Layout, memory: Staging, skeleton: Mapping[str, Any]) -> None:
    """Give every component its state. Nothing is changed before all of it fits."""
    missing = sorted(name for name in components.keys() - skeleton.keys() if not name.startswith(RESERVED))
    if missing:
        saved = ", ".join(sorted(name for name in skeleton if not name.startswith(RESERVED)))
        raise CheckpointError(f"the checkpoint has no state of {', '.join(missing)}; it has {saved}")
    tensors = {e.name: memory.tensor(e.start, DTYPES[e.dtype], e.shape) for e in layout.entries}
    _check_modules(components, skeleton, tensors)
    _check_optimizers(components, skeleton)
    for name, component in components.items():
        if name not in skeleton:
            continue
        if isinstance(component, torch.nn.Module):  # copies into its own tensors
            component.load_state_dict(rebuild(skeleton[name], tensors))
            continue
        state = rebuild(skeleton[name], _Cloned(tensors))  # others keep what they are given
        if hasattr(component, "load_state_dict"):
            component.load_state_dict(state)
        elif isinstance(component, torch.Tensor):
            with torch.no_grad():
                component.copy_(state)
        else:
            components[name] = state


class _Cloned(dict[str, torch.Tensor]):
    """Tensors with memory of their own, made when they are asked for; tied ones stay tied."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __missing__(self, name: str) -> torch.Tensor:
        self[name] = self._tensors[name].clone()
        return self[name]


def _check_optimizers(components: Mapping[str, Any], skeleton: Mapping[str, Any]) -> None:
    for name, component in components.items():
        if not isinstance(component, torch.optim.Optimizer):
            continue
        saved = skeleton[name].get("param_groups") if isinstance(skeleton[name], dict) else None
        if not isinstance(saved, list):
            continue  # of a kind that has its own idea of a state
        mine, theirs = ([len(group["params"]) for group in groups] for groups in (component.param_groups, saved))
        if mine != theirs:
            raise CheckpointError(
                f"the checkpoint is of another optimizer: {name} has groups of {mine} parameters, saved {theirs}"
            )


def _check_modules(
    components: Mapping[str, Any], skeleton: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    problems: list[str] = []
    for name, component in components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        try:
            saved = rebuild(skeleton[name], tensors)
        except (KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"the saved state of {name} cannot be read: {error}") from None
        own = component.state_dict()
        problems += [f"{name}.{key} is not in the checkpoint" for key in own if key not in saved]
        problems += [f"{name}.{key} is not in the model" for key in saved if key not in own]
        problems += [
            f"{name}.{key} is {tuple(own[key].shape)}, saved {tuple(saved[key].shape)}"
            for key in own
            if key in saved and isinstance(own[key], torch.Tensor) and own[key].shape != saved[key].shape
        ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(problems[:8])}{more}")
