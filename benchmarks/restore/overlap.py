"""From the start of a process to its next finished training step: GPT-2 small with AdamW, restored from a memory node.

Once with the stages one after another (interpreter and imports, model, restore, step), once with ``deepvm-fetch``
started at the same moment as the trainer, and once with that and a restore on demand, whose step begins before all
bytes are there. All are the same program, and every round has one of each, over three networks: loopback, where bytes
cost nothing but the processors' time, and what a g4dn.xlarge and a g5.xlarge (the paper's workers) may use for as long
as they like, 5 and 2.5 Gbit/s. These need root: two network namespaces, joined by a link with a token bucket (tc, tbf).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SEED = 7
RUN = "overlap"
TOKENS = (1, 65)  # a short sequence: the step is a step, and not what is measured
APART, OVERLAPPED, ON_DEMAND = "one after another", "overlapped", "overlapped and on demand"
KINDS = (APART, OVERLAPPED, ON_DEMAND)
LOOPBACK = "loopback"
BIT_PER_S = {"5 Gbit/s": 5 * 10**9, "2.5 Gbit/s": 2_500_000_000}  # by network
TRAINER, NODE = "10.78.0.1", "10.78.0.2"
CAPACITY_BYTES = 4 * 10**9
DEADLINE_S = 120


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each round: ``loopback, overlapped`` and so on in total, ``loopback, overlapped: restore`` of a stage.
    The first round, which fills caches, is not counted. Without root there is no limited network."""
    found = _measure(LOOPBACK, rounds)
    try:
        for network, rate in BIT_PER_S.items():
            with _link(rate) as (trainer, node):
                prefixes = [("ip", "netns", "exec", name) for name in (trainer, node)]
                found.update(_measure(network, rounds, f"{NODE}:0", *prefixes))
    except (PermissionError, FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"overlap: no limited network, namespaces and tc need root ({error})", file=sys.stderr, flush=True)
    return found


def _measure(
    network: str,
    rounds: int,
    listen: str = "127.0.0.1:0",
    trainer: Sequence[str] = (),
    node: Sequence[str] = (),
) -> dict[str, list[float]]:
    from benchmarks.checkpoint.contest.ours import MemoryNode
    from benchmarks.common import limits
    from benchmarks.common.scratch import scratch_folder

    chance = random.Random(SEED)
    found: dict[str, list[float]] = {}
    awake = limits.AwakeMemory()
    with scratch_folder() as scratch, _token(scratch) as token:
        memory_node = MemoryNode(scratch, CAPACITY_BYTES, "--token-file", str(token), listen=listen, prefix=tuple(node))
        try:
            url = f"memory://{memory_node.address}"
            _finish(_start([*trainer, sys.executable, __file__, "save", url]))
            for number in range(rounds + 1):
                for kind in chance.sample(KINDS, len(KINDS)):
                    with awake:
                        times = _resume(url, trainer, kind)
                    shown = " ".join(f"{what or 'total'} {seconds:.2f}" for what, seconds in times.items())
                    print(
                        f"{time.strftime('%H:%M:%S')} overlap: {network}, {kind}: {shown}", file=sys.stderr, flush=True
                    )
                    for what, seconds in times.items() if number else ():
                        name = f"{network}, {kind}" + (f": {what}" if what else "")
                        found.setdefault(name, []).append(seconds)
        finally:
            memory_node.close()
    return found


def _resume(url: str, prefix: Sequence[str], kind: str) -> dict[str, float]:
    """One start of a trainer: seconds in total, under "", and of its stages."""
    began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    fetcher = None
    if kind != APART:
        fetcher = _start([*prefix, sys.executable, "-m", "deepvm.fetch", "--run", RUN, url])
    try:
        command = [*prefix, sys.executable, __file__, "resume on demand" if kind == ON_DEMAND else "resume", url]
        told = json.loads(_finish(_start(command)))
    finally:
        if fetcher is not None:
            fetcher.terminate()  # it has ended, unless the trainer failed
            fetcher.communicate(timeout=DEADLINE_S)
    stages = {stage["name"]: stage["ended_s"] - stage["began_s"] for stage in told["timeline"]["stages"]}
    assert ("fetch" in stages) == (kind != APART), told
    return {"": told["finished_s"] - began_s, **stages}


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Compiled files are kept, as they are where nothing forbids it: imports are a part of what is measured."""
    repository = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(repository), *sys.path])
    return subprocess.Popen(command, cwd=repository, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _finish(process: subprocess.Popen[bytes]) -> bytes:
    told, _ = process.communicate(timeout=DEADLINE_S)
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with exit code {process.returncode}")
    return told


@contextlib.contextmanager
def _token(scratch: Path) -> Iterator[Path]:
    """A node that listens beyond loopback demands one; trainers and fetchers find it in the environment."""
    path = scratch / "token"
    path.touch(mode=0o600)
    os.environ["DEEPVM_TOKEN"] = secrets.token_hex()
    path.write_text(os.environ["DEEPVM_TOKEN"], encoding="utf-8")
    try:
        yield path
    finally:
        del os.environ["DEEPVM_TOKEN"]


@contextlib.contextmanager
def _link(bit_per_s: int) -> Iterator[tuple[str, str]]:
    """Namespaces for trainer and node, and a link between them that carries so much and no more towards the trainer."""
    trainer, node = (f"deepvm-{role}-{os.getpid()}" for role in ("overlap", "memory"))
    try:
        for name in (trainer, node):
            _run("ip", "netns", "add", name)
        _run(*f"ip link add to-node netns {trainer} type veth peer name to-trainer netns {node}".split())
        for name, device, address in ((trainer, "to-node", TRAINER), (node, "to-trainer", NODE)):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        limit = f"root tbf rate {bit_per_s}bit burst 4mb latency 50ms"
        _run("ip", "netns", "exec", node, "tc", "qdisc", "add", "dev", "to-trainer", *limit.split())
        yield trainer, node
    finally:
        for name in (trainer, node):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=DEADLINE_S, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)


# --- in the trainer's process ---------------------------------------------------------------------------------------


def _model() -> tuple[Any, Any]:
    import torch

    from benchmarks.common.workloads import GPT2

    torch.manual_seed(SEED)
    model = GPT2()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _step(model: Any, optimizer: Any) -> None:
    import torch

    tokens = torch.randint(0, 50257, TOKENS, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    model.loss(tokens).backward()
    optimizer.step()


def save(url: str) -> None:
    import deepvm

    model, optimizer = _model()
    _step(model, optimizer)
    with deepvm.Checkpointer({"model": model, "optimizer": optimizer}, url, run=RUN, on_error="raise") as ckpt:
        ckpt.save(1).wait("durable", DEADLINE_S)


def resume(url: str, *, lazy: bool) -> None:
    import torch  # noqa: F401 - before deepvm, which then can tell import and model apart

    import deepvm

    model, optimizer = _model()
    ckpt = deepvm.Checkpointer({"model": model, "optimizer": optimizer}, url, run=RUN, policy="every 1h")
    assert ckpt.restore(lazy=lazy) == 1
    _step(model, optimizer)
    finished_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    print(json.dumps({"finished_s": finished_s, "timeline": ckpt.timeline().to_json()}), flush=True)
    os._exit(0)  # what a trainer does at its end is not measured, nor waited for


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(sys.argv[2])
    else:
        resume(sys.argv[2], lazy=sys.argv[1] != "resume")
