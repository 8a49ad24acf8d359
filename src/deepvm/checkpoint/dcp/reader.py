"""A checkpoint in a store -> the tensors and values that DCP's load plan wants. ``tensor_reads`` reads the chunks."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from deepvm.checkpoint.dcp.checkpoint_id import StepFromId
from deepvm.checkpoint.dcp.metadata import Contents, decode, decode_object
from deepvm.checkpoint.dcp.tensor_reads import Read, read_all
from deepvm.checkpoint.environment import resolve_secrets
from deepvm.errors import CheckpointError, StoreError
from deepvm.store.base import Manifest, Store, check_run
from deepvm.store.safetensors import read_header
from deepvm.store.search import FoundCheckpoints, find_checkpoints
from deepvm.store.urls import open_stores


class DeepvmReader(StepFromId, StorageReader):
    """Loads from any store, or from the nearest of several. Without a step, loads the newest checkpoint.

    Tensors are filled as their chunks arrive: discard the state if a load fails.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        run: str,
        step: int | None = None,
        token: str | None = None,
        key: str | None = None,
    ) -> None:
        self._url, self._run, self._wanted_step = url, check_run(run), step
        self._token, self._key = token, key
        self._stores: tuple[Store, ...] = ()
        self._found: tuple[Store, Manifest, Contents] | None = None
        self.step: int | None = None  # of the checkpoint that was found
        self.bytes_read = 0

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        token, key = resolve_secrets(self._token, self._key)
        self.close()
        self._stores = open_stores(self._url, token=token, key=key)
        try:
            return self._find()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for store in self._stores:
            store.close()
        self._stores = ()

    def _find(self) -> Metadata:
        """Find the newest checkpoint whose header can be read, in the nearest store."""
        found = find_checkpoints(self._stores, self._run, self._wanted_step)
        problems = found.problems
        for step, index in found.candidates:
            store = self._stores[index]
            try:
                manifest = store.manifest(self._run, step)
                contents = decode(read_header(store, manifest))
            except (StoreError, CheckpointError) as error:
                problems.append(f"step {step} in {store.url}: {error}")
                continue
            self._found, self.step = (store, manifest, contents), step
            return contents.metadata
        what = f"run {self._run}" if self._wanted_step is None else f"step {self._wanted_step} of run {self._run}"
        why = "; ".join(problems) or self._describe(found)
        raise CheckpointError(f"no checkpoint of {what} can be loaded: {why}")

    def _describe(self, found: FoundCheckpoints) -> str:
        """Say what the stores have instead."""
        rows = []
        for store in self._stores:
            if steps := found.steps[store.url]:
                rows.append(f"{store.url} has its steps {', '.join(map(str, steps[-8:]))}")
            else:
                with suppress(StoreError):
                    rows.append(f"{store.url} has runs {', '.join(store.runs()[:8]) or '(none)'}")
        return "; ".join(rows)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        steps = sorted({plan.storage_data for plan in plans})
        if len(steps) > 1:
            raise CheckpointError(f"the ranks found different newest steps ({steps}): pass step=")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._found is not None  # noqa: S101 - read_metadata comes first
        store, manifest, contents = self._found
        reads = []
        try:
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    # The planner unpickles these bytes. They were pickled here: a store never holds any.
                    buffer = io.BytesIO()
                    torch.save(decode_object(contents.objects[item.storage_index.fqn]), buffer)
                    buffer.seek(0)
                    planner.load_bytes(item, buffer)
                else:
                    shard = contents.metadata.storage_data[item.storage_index]
                    reads.append(Read(item, shard, planner.resolve_tensor(item).detach()))
            self.bytes_read = read_all(store, manifest, reads, planner)
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done
