"""Connections that are limited one by one, as clouds do: several of them carry more than one.

Trainer and memory node are in network namespaces of their own, joined by a pair of virtual interfaces. Every port that
the trainer connects from has a class of its own (tc, htb) with a fixed rate, in both directions, so that each
connection is limited and their sum is not. Needs root.
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
from collections.abc import Iterator
from pathlib import Path

from benchmarks import Options, Result, measurement
from benchmarks.common.scratch import REPOSITORY, scratch_folder

SEED = 7
RATE_BIT_PER_S = 10**9
CONNECTIONS = (1, 2, 4)
ROUNDS, QUICK_ROUNDS = 15, 3
TRAINER, NODE = "10.77.0.1", "10.77.0.2"
PORTS = range(40_000, 40_128)
DEADLINE_S = 120
ABOUT = (
    f"Saves of ResNet-50 with Adam into a memory node in another network namespace, each connection limited to "
    f"{RATE_BIT_PER_S / 1e9:g} Gbit/s."
)


def run(options: Options) -> Result:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    try:
        with scratch_folder() as scratch, namespaces() as (trainer, node):
            rates = _measure(scratch, trainer, node, rounds)
    except (PermissionError, FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        notes = [f"Skipped: namespaces and tc need root and a kernel with htb ({reason})."]
        return Result(title="Limited connections", about=ABOUT, seed=SEED, measurements=[], notes=notes)
    found = [
        measurement(f"{count} connection{'s' * (count > 1)}", [r / 1e6 for r in rates[count]], unit="MB/s")
        for count in CONNECTIONS
    ]
    most = CONNECTIONS[-1]
    for count in CONNECTIONS[1:]:
        times = [a / b for a, b in zip(rates[count], rates[1], strict=True)]
        wanted = 3.5 if count == most else None
        found.append(measurement(f"{count} connections over one", times, unit="times", at_least=wanted))
    return Result(
        title="Limited connections",
        about=ABOUT,
        seed=SEED,
        measurements=found,
        notes=[
            "From save() until all bytes are verified in the node's memory, in an order drawn anew each round.",
            f"The limit is {RATE_BIT_PER_S / 8e6:g} MB/s a connection, headers of the network included.",
        ],
        samples={str(count): values for count, values in rates.items()},
    )


def _measure(scratch: Path, trainer: str, node: str, rounds: int) -> dict[int, list[float]]:
    found = in_namespaces("benchmarks.transfer.flows", scratch, trainer, node, rounds, 2 * 10**9)
    return {int(count): values for count, values in found.items()}


def in_namespaces(
    module: str, scratch: Path, trainer: str, node: str, rounds: int, capacity_bytes: int
) -> dict[str, list[float]]:
    """What a module prints (as JSON) that runs as a trainer, given the address of a memory node and the rounds."""
    from benchmarks.checkpoint.contest.ours import MemoryNode

    token = scratch / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(), encoding="utf-8")  # a node that listens beyond loopback demands one
    prefix = ("ip", "netns", "exec", node)
    memory_node = MemoryNode(scratch, capacity_bytes, "--token-file", str(token), listen=f"{NODE}:0", prefix=prefix)
    try:
        command = ["ip", "netns", "exec", trainer, sys.executable, "-m", module]
        done = subprocess.run(
            [*command, memory_node.address, str(rounds)],
            cwd=REPOSITORY,
            env={**os.environ, "DEEPVM_TOKEN": token.read_text(encoding="utf-8")},
            stdout=subprocess.PIPE,
            timeout=DEADLINE_S + 30 * rounds,
            check=True,
        )
    finally:
        memory_node.close()
    return dict(json.loads(done.stdout))


def trainer_main(address: str, rounds: int) -> None:
    """In the trainer's namespace: print bytes a second by number of connections."""
    import deepvm
    from benchmarks.common import workloads

    state = workloads.build("resnet50")
    parts = {"model": state.model, "optimizer": state.optimizer}
    savers = {
        count: deepvm.Checkpointer(
            parts, store=f"memory://{address}?connections={count}", run=f"flows-{count}", on_error="raise"
        )
        for count in CONNECTIONS
    }
    rates: dict[int, list[float]] = {count: [] for count in CONNECTIONS}
    chance = random.Random(SEED)
    for number in range(rounds + 1):
        for count in chance.sample(CONNECTIONS, len(CONNECTIONS)):
            state.step()
            rate = _rate(savers[count], number)
            if number:  # the first connects
                rates[count].append(rate)
    json.dump(rates, sys.stdout)


def _rate(saver: object, step: int) -> float:
    start = time.perf_counter()
    handle = saver.save(step)  # type: ignore[attr-defined]
    handle.wait("remote", timeout_s=DEADLINE_S)
    rate = handle.bytes_sent / (time.perf_counter() - start)
    handle.wait("durable", timeout_s=DEADLINE_S)  # so that its writing is over when the next one is measured
    return float(rate)


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    trainer, node = (f"deepvm-{role}-{os.getpid()}" for role in ("trainer", "node"))
    try:
        for name in (trainer, node):
            _ip("netns", "add", name)
        _ip("link", "add", "to-node", "netns", trainer, "type", "veth", "peer", "name", "to-trainer", "netns", node)
        for name, device, address in ((trainer, "to-node", TRAINER), (node, "to-trainer", NODE)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        ports = f"net.ipv4.ip_local_port_range={PORTS[0]} {PORTS[-1]}"
        _ip("netns", "exec", trainer, "sysctl", "-q", "-w", ports)
        _limit(trainer, "to-node", "sport")
        _limit(node, "to-trainer", "dport")
        yield trainer, node
    finally:
        for name in (trainer, node):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=DEADLINE_S, check=False)


def _limit(namespace: str, device: str, port_of_trainer: str) -> None:
    """One class for each port that the trainer may connect from, for what leaves by a device."""
    lines = [f"qdisc add dev {device} root handle 1: htb default ffff"]
    for index, port in enumerate(PORTS, start=1):
        rate = f"rate {RATE_BIT_PER_S}bit ceil {RATE_BIT_PER_S}bit burst 256k cburst 256k quantum 60000"
        lines.append(f"class add dev {device} parent 1: classid 1:{index:x} htb {rate}")
        match = f"match ip {port_of_trainer} {port} 0xffff"
        lines.append(f"filter add dev {device} parent 1: protocol ip prio 1 u32 {match} flowid 1:{index:x}")
    _ip("netns", "exec", namespace, "tc", "-batch", "-", input_text="\n".join(lines) + "\n")


def _ip(*arguments: str, input_text: str | None = None) -> None:
    subprocess.run(["ip", *arguments], input=input_text, capture_output=True, text=True, timeout=DEADLINE_S, check=True)


if __name__ == "__main__":
    trainer_main(sys.argv[1], int(sys.argv[2]))
