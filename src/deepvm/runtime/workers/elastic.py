"""PyTorch's elastic agent with workers forked from a template. It handles rendezvous, restarts, ranks and logs
itself."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.utils.api import macros

from deepvm.runtime.workers.forked_worker import run_script
from deepvm.runtime.workers.template import Template
from deepvm.runtime.workers.worker import Worker

_RENDEZVOUS_S = 900  # torch's own default
_KILLED_S = 30.0  # for a killed process to be gone

logger = logging.getLogger(__name__)


class TemplateContext(PContext):
    """A node's workers, forked from a template. Exit codes and signals mean what they mean for torchrun."""

    def __init__(
        self,
        *,
        template: Template,
        as_module: bool,
        name: str,
        script: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None,
    ) -> None:
        super().__init__(name, script, args, envs, logs_specs, log_line_prefixes)
        self._template, self._script, self._as_module = template, script, as_module
        self._workers: dict[int, Worker] = {}

    def _start(self) -> None:
        for local_rank in range(self.nprocs):
            with contextlib.ExitStack() as files:
                self._workers[local_rank] = self._template.start(
                    run_script,
                    [self._script, [str(word) for word in self.args[local_rank]], self._as_module],
                    env={**self._template.env, **self.envs[local_rank]},
                    stdout=_descriptor(files, self.stdouts[local_rank], 1),
                    stderr=_descriptor(files, self.stderrs[local_rank], 2),
                )

    def _poll(self) -> RunProcsResult | None:
        codes = {local_rank: worker.poll() for local_rank, worker in self._workers.items()}
        if any(codes.values()):  # the agent restarts all workers or none: end the others
            first = next(local_rank for local_rank, code in codes.items() if code)
            worker = self._workers[first]
            logger.error(
                "%s ended with exit code %s (local rank %d, pid %d)", self._script, codes[first], first, worker.pid
            )
            failed = {first: self._failure(first)}
            self.close()
            failed |= {
                local_rank: self._failure(local_rank)
                for local_rank, worker in self._workers.items()
                if worker.poll() and local_rank != first
            }
            return RunProcsResult(failures=failed, stdouts=self.stdouts, stderrs=self.stderrs)
        if None in codes.values():
            return None
        self.close()
        return RunProcsResult(return_values=dict.fromkeys(codes), stdouts=self.stdouts, stderrs=self.stderrs)

    def pids(self) -> dict[int, int]:
        return {local_rank: worker.pid for local_rank, worker in self._workers.items()}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        for number, seconds in ((death_sig, float(timeout)), (signal.SIGKILL, _KILLED_S)):
            for worker in self._workers.values():
                worker.signal(number)
            deadline = time.monotonic() + seconds
            for worker in self._workers.values():
                with contextlib.suppress(TimeoutError):
                    worker.wait(timeout_s=max(0.0, deadline - time.monotonic()))
            if all(worker.returncode is not None for worker in self._workers.values()):
                return
        left = [worker.pid for worker in self._workers.values() if worker.returncode is None]
        logger.error("processes %s did not end after SIGKILL; they may hang in a driver", left)

    def _failure(self, local_rank: int) -> ProcessFailure:
        worker = self._workers[local_rank]
        return ProcessFailure(
            local_rank=local_rank,
            pid=worker.pid,
            exitcode=worker.returncode or 0,
            error_file=self.error_files[local_rank],
        )


def _descriptor(files: contextlib.ExitStack, path: str, inherited: int) -> int:
    """Return the descriptor of a log file; without a path, the launcher's own stream."""
    if not path:
        return inherited
    return files.enter_context(Path(path).open("w", encoding="utf-8")).fileno()


class GroupCallbacks(Protocol):
    """Decisions about this node's workers that are made outside of torch's rendezvous."""

    def environment(self) -> Mapping[str, str]:
        """Return more variables for the workers that start now."""
        ...

    def failed_because_of_peer(self, exit_code: int) -> bool:
        """True if this node's workers failed because others were lost; they are then restarted in any case. The first
        one ended with this code."""
        ...


class TemplateAgent(LocalElasticAgent):
    """The local agent, which starts a node's workers from a template."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        template: Template,
        as_module: bool,
        group: GroupCallbacks | None = None,
    ) -> None:
        super().__init__(spec, logs_specs)
        self._template, self._as_module, self._group = template, as_module, group

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        failed = result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        codes = [failure.exitcode for _, failure in sorted(result.failures.items())]
        if failed and self._group is not None and self._group.failed_because_of_peer(codes[0] if codes else 0):
            return RunResult(state=WorkerState.HEALTHY)  # the rendezvous reports that the group has changed
        return result

    def _exit_barrier(self) -> None:
        if self._group is None:  # else the hub waits for the group's machines, and detects losses
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        restarts = spec.max_restarts - self._remaining_restarts
        shared = {
            "GROUP_RANK": str(worker_group.group_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        envs = {
            worker.local_rank: {
                **shared,
                "LOCAL_RANK": str(worker.local_rank),
                "RANK": str(worker.global_rank),
                "WORLD_SIZE": str(worker.world_size),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
            }
            for worker in worker_group.workers
        }
        if self._group is not None:
            for env in envs.values():
                env.update(self._group.environment())
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        self._pcontext = TemplateContext(
            template=self._template,
            as_module=self._as_module,
            name=spec.role,
            script=str(spec.entrypoint),
            args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in envs},
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=None,
        )
        began = time.monotonic()
        self._pcontext.start()
        logger.info("started %d workers from the template in %.3f s", len(envs), time.monotonic() - began)
        return self._pcontext.pids()


def run_agent(
    *,
    script: str,
    args: Sequence[str],
    as_module: bool,
    template: Template | None,
    local_world_size: int,
    nodes: tuple[int, int],
    max_restarts: int,
    monitor_interval_s: float,
    role: str,
    log_dir: str,
    redirects: str,
    tee: str,
    rendezvous: dict[str, Any] | RendezvousHandler,
    group: GroupCallbacks | None = None,
) -> None:
    """Run until every worker is done. Raise ChildFailedError if they failed for the last time.

    Without a template, torch's own agent starts workers as fresh interpreters."""
    if isinstance(rendezvous, dict):
        rendezvous = rendezvous_registry.get_rendezvous_handler(
            RendezvousParameters(min_nodes=nodes[0], max_nodes=nodes[1], **{"timeout": _RENDEZVOUS_S, **rendezvous})
        )
    fresh = ("-u", "-m", script) if as_module else ("-u", script)
    spec = WorkerSpec(
        role=role,
        local_world_size=local_world_size,
        entrypoint=script if template is not None else sys.executable,
        args=tuple(args) if template is not None else (*fresh, *args),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval_s,
    )
    logs = DefaultLogsSpecs(log_dir=log_dir, redirects=Std.from_str(redirects), tee=Std.from_str(tee))
    agent = LocalElasticAgent(spec, logs) if template is None else TemplateAgent(spec, logs, template, as_module, group)
    closes = True
    try:
        result = agent.run()
    except SignalException:  # it ends this node alone; closing the rendezvous would end the others too
        closes = False
        raise
    finally:
        if closes:
            spec.rdzv_handler.shutdown()
    if result is not None and result.is_failed():
        raise ChildFailedError(name=script, failures=result.failures)
