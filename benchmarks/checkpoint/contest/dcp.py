"""torch.distributed.checkpoint, in the ways it offers on CPU. It fsyncs by itself."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.checkpoint.contest import Times
from benchmarks.common.workloads import State

DEADLINE_S = 120


class Save:
    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        del options
        self._state = state
        self._scratch = scratch

    def save(self, step: int) -> Times:
        folder = self._scratch / f"step-{step}"
        times = self._save(folder)
        shutil.rmtree(folder)
        return times

    def _save(self, folder: Path) -> Times:
        start = time.perf_counter()
        dcp.save(self._state.state_dict(), checkpoint_id=folder)
        taken = time.perf_counter() - start
        return {"at_once": taken, "long_step": taken, "durable": taken}

    def close(self) -> None: ...


class AsyncThread(Save):
    stager: AsyncStager | None = None
    kind = AsyncCheckpointerType.THREAD

    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        super().__init__(state, scratch, options)
        store = dist.FileStore(tempfile.mktemp(dir=scratch), 1)  # noqa: S306 - the store makes it, in our own folder
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def _save(self, folder: Path) -> Times:
        start = time.perf_counter()
        pending: Any = dcp.async_save(
            self._state.state_dict(),
            checkpoint_id=folder,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        called = time.perf_counter() - start
        staged = called
        if hasattr(pending, "staging_completion"):
            pending.staging_completion.result(timeout=DEADLINE_S)
            staged = time.perf_counter() - start
            pending = pending.upload_completion
        pending.result(timeout=DEADLINE_S)
        return {"at_once": staged, "long_step": called, "durable": time.perf_counter() - start}

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class AsyncProcess(AsyncThread):
    kind = AsyncCheckpointerType.PROCESS


class AsyncCached(AsyncThread):
    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        super().__init__(state, scratch, options)
        # One stager kept over all saves, so that its memory is warm. (BlockingAsyncStager's cache pins memory, which
        # fails without a GPU.)
        self.stager = DefaultStager(StagingOptions(False, False, False, False))


class AsyncStaging(AsyncThread):
    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        super().__init__(state, scratch, options)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
            )
        )
