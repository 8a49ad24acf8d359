"""deepvm.Checkpointer with a memory node of its own process, as a user would start it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deepvm
from benchmarks.checkpoint.contest import Times
from benchmarks.common.workloads import State

DEADLINE_S = 120
RUN = "bench"
BLOCK_BYTES = 4 * 2**20


class MemoryNode:
    """``deepvm memory-node`` as a process, spilling into the scratch folder."""

    def __init__(
        self,
        scratch: Path,
        capacity_bytes: int,
        *more: str,
        listen: str = "127.0.0.1:0",
        prefix: tuple[str, ...] = (),
    ) -> None:
        self._ready = scratch / "ready"
        self._spill = scratch / "spill"
        self._spill.mkdir(exist_ok=True)
        program = str(Path(sys.executable).with_name("deepvm"))
        command = [*prefix, program, "memory-node", "--listen", listen, "--ready-file", str(self._ready)]
        command += ["--capacity", str(capacity_bytes), "--spill", str(self._spill), *more]
        log = (scratch / "node.log").open("wb")
        self._process = subprocess.Popen(command, stderr=log)
        log.close()
        deadline = time.monotonic() + DEADLINE_S
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = (scratch / "node.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise RuntimeError(f"the memory node does not start: {self._process.poll()} {' '.join(last)}")
            time.sleep(0.02)
        self.address = self._ready.read_text(encoding="utf-8").strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_idle(self, seconds: float = 1.0) -> None:
        """Until it has used no processor for so long: it has spilled what was saved."""
        deadline, before = time.monotonic() + DEADLINE_S, -1.0
        while (now := _processor_s(self.pid)) > before + 0.02 * seconds and time.monotonic() < deadline:
            before = now
            time.sleep(seconds)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=DEADLINE_S)
        shutil.rmtree(self._spill, ignore_errors=True)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class DeepVM:
    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        self._state = state
        self._node_before = empty_node_bytes(scratch)
        self._node = MemoryNode(scratch, capacity_bytes(state.size_bytes))
        self._before = rss_bytes(os.getpid())
        self._checkpointer = deepvm.Checkpointer(
            {"model": state.model, "optimizer": state.optimizer},
            store=f"memory://{self._node.address}?connections={options.get('connections', 2)}",
            run=RUN,
            on_error="raise",
        )
        self._may_step = 0.0
        state.optimizer.register_step_pre_hook(self._note)  # runs after the checkpointer's own, which waits

    def _note(self, *_: object) -> None:
        self._may_step = time.perf_counter()

    def save(self, step: int) -> Times:
        return {**self._at_once(2 * step), **self._long_step(2 * step + 1)}

    def _at_once(self, step: int) -> Times:
        """The optimizer steps right after the call, and its update competes with the transfer."""
        start = time.perf_counter()
        handle = self._checkpointer.save(step)
        self._state.optimizer.step()
        stall = self._may_step - start
        handle.wait("remote", timeout_s=DEADLINE_S)
        remote = time.perf_counter() - start
        handle.wait("durable", timeout_s=DEADLINE_S)
        return {"at_once": stall, "remote_at_once": remote}

    def _long_step(self, step: int) -> Times:
        """The optimizer steps when the transfer is over."""
        self._state.new_gradients()
        os.sync()
        start = time.perf_counter()
        handle = self._checkpointer.save(step)
        called = time.perf_counter() - start
        handle.wait("remote", timeout_s=DEADLINE_S)
        remote = time.perf_counter() - start
        handle.wait("durable", timeout_s=DEADLINE_S)
        durable = time.perf_counter() - start
        extra = rss_bytes(os.getpid()) - self._before
        stepped = time.perf_counter()
        self._state.optimizer.step()
        return {
            "long_step": called + self._may_step - stepped,
            "remote": remote,
            "durable": durable,
            "bytes_sent": handle.bytes_sent,
            "trainer_bytes": extra,
            "node_bytes": rss_bytes(self._node.pid) - self._node_before,
        }

    def close(self) -> None:
        self._checkpointer.close()
        self._node.close()


def capacity_bytes(size_bytes: int, buffers: int = 2) -> int:
    """Room for so many checkpoints of a state, each with its header, in whole blocks."""
    return buffers * (-(-(size_bytes + 2**20) // BLOCK_BYTES)) * BLOCK_BYTES


def empty_node_bytes(scratch: Path) -> int:
    """What a memory node takes before it holds anything."""
    node = MemoryNode(scratch, BLOCK_BYTES)
    found = rss_bytes(node.pid)
    node.close()
    return found


def rss_bytes(pid: int, what: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no {what}")
