"""The reader: the newest checkpoint that is there, and of it the chunks that hold what this rank wants."""

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

from deepvm.checkpoint.dcp.checkpoint_id import step_of, tells_step
from deepvm.checkpoint.dcp.metadata import Contents, decode, decode_object
from deepvm.checkpoint.dcp.tensor_reads import Read, read_all
from deepvm.checkpoint.environment import resolve_secrets
from deepvm.errors import CheckpointError, StoreError
from deepvm.store.base import Manifest, Store, check_run
from deepvm.store.safetensors import read_header
from deepvm.store.urls import open_stores


class DeepvmReader(StorageReader):
    """Loads from any store, or from the nearest of several; without a step, the newest that is there.

    Tensors are filled as their chunks arrive: a load that fails leaves a state that is to be thrown away.
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
        self._url, self._run, self._wanted = url, check_run(run), step
        self._token, self._key = token, key
        self._stores: tuple[Store, ...] = ()
        self._store: Store | None = None
        self._manifest: Manifest | None = None
        self._contents: Contents | None = None
        self.step: int | None = None  # that was found
        self.bytes_read = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._wanted = step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return tells_step(checkpoint_id)

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
        """The newest checkpoint whose header can be read, in the nearest store."""
        problems: list[str] = []
        found: list[tuple[int, int]] = []
        for nearness, store in enumerate(self._stores):
            try:
                found += [(-s, nearness) for s in store.steps(self._run) if self._wanted in (None, s)]
            except StoreError as error:
                problems.append(f"{store.url}: {error}")
        for negative, nearness in sorted(found):
            store, step = self._stores[nearness], -negative
            try:
                manifest = store.manifest(self._run, step)
                contents = decode(read_header(store, manifest))
            except (StoreError, CheckpointError) as error:
                problems.append(f"step {step} in {store.url}: {error}")
                continue
            self._store, self._manifest, self._contents, self.step = store, manifest, contents, step
            return contents.metadata
        what = f"run {self._run}" if self._wanted is None else f"step {self._wanted} of run {self._run}"
        raise CheckpointError(f"no checkpoint of {what} can be loaded: {'; '.join(problems) or self._what_there_is()}")

    def _what_there_is(self) -> str:
        told = []
        for store in self._stores:
            with suppress(StoreError):
                steps = store.steps(self._run)
                told.append(
                    f"{store.url} has its steps {', '.join(map(str, steps[-8:]))}"
                    if steps
                    else f"{store.url} has runs {', '.join(store.runs()[:8]) or '(none)'}"
                )
        return "; ".join(told)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        steps = sorted({plan.storage_data for plan in plans})
        if len(steps) > 1:
            raise CheckpointError(f"the ranks found different newest steps ({steps}): name one with step=")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        store, manifest, contents = self._store, self._manifest, self._contents
        assert store is not None  # noqa: S101 - read_metadata found them
        assert manifest is not None  # noqa: S101
        assert contents is not None  # noqa: S101
        reads = []
        try:
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    # The planner unpickles what it is given. That never was elsewhere than in this memory.
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
