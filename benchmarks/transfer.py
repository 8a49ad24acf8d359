"""What keeps bytes from remote memory: the way from a trainer's memory into a node's, taken apart.

iperf3 sends one buffer of 1 MiB again and again, which never leaves the caches, and looks at nothing. A checkpoint is
read from memory and written to memory, and hashed at both ends. So the same bytes are sent between two plain processes,
as iperf3 would, but from memory of the checkpoint's size into memory of its size; then with checksums; then by deepvm.
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import sys
import threading
import time
from collections import defaultdict
from multiprocessing.connection import Connection

import xxhash

from benchmarks import Options, Result, limits, measurement
from benchmarks.checkpoint_contest.contest import OURS, Worker, Workload, scratch_folder
from deepvm.memnode.sockets import tune

SEED = 7
ROUNDS, QUICK_ROUNDS = 15, 3
PIECE = 4 * 2**20  # as large as a chunk
HASHED = 2**18  # received and hashed at once, while it is in the cache
CONNECTIONS = 2
WORKLOADS = (
    Workload(name="resnet50", title="ResNet-50 + Adam", size_bytes=0.31e9),
    Workload(name="gpt2", title="GPT-2 small + AdamW", size_bytes=1.49e9),
)


def run(options: Options) -> Result:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    found, samples = [], {}
    for workload in WORKLOADS:
        rates = samples[workload.name] = _measure(workload, rounds)
        plain, hashed = rates["memory to memory"], rates["with checksums"]
        for what, values in rates.items():
            found.append(measurement(f"{workload.title}: {what}", [v / 2**30 for v in values], unit="GiB/s"))
        for what, mine, theirs in (
            ("memory to memory, over iperf3", plain, rates["iperf3 -l 1M"]),
            ("with checksums, over iperf3", hashed, rates["iperf3 -l 1M"]),
            ("deepvm over iperf3", rates["deepvm"], rates["iperf3 -l 1M"]),
            ("deepvm over memory to memory with checksums", rates["deepvm"], hashed),
        ):
            ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
            wanted = 0.8 if what.startswith("deepvm over memory") else None
            found.append(measurement(f"{workload.title}: {what}", ratios, unit="times", at_least=wanted))
    return Result(
        title="Transfer",
        about="The way of a checkpoint's bytes into the memory of a node on this machine, taken apart.",
        seed=SEED,
        measurements=found,
        notes=[
            "iperf3 -l 1M: one stream, one buffer that stays in the cache, no checksums.",
            f"memory to memory: two processes, {CONNECTIONS} connections set up as deepvm's, pieces of 4 MiB, from "
            "memory of the size of the state into memory of that size, nothing else; with checksums: the same, hashed "
            "(xxh3) at both ends.",
            "deepvm: from save() until all bytes are verified in the node, layout, commit and manifest included.",
        ],
        samples=samples,
    )


def _measure(workload: Workload, rounds: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = defaultdict(list)
    iperf3 = limits.Iperf3()
    chance = random.Random(SEED)
    with scratch_folder() as scratch:
        ours = Worker(OURS, workload, scratch)
        size = ours.size_bytes // PIECE * PIECE
        pipe = _Pipe(size)
        try:
            for number in range(rounds + 2):
                print(f"{time.strftime('%H:%M:%S')} transfer: {workload.name} {number}", file=sys.stderr, flush=True)
                times = {}
                for kind in chance.sample(["iperf3 -l 1M", "memory to memory", "with checksums", "deepvm"], 4):
                    if kind == "deepvm":
                        times[kind] = ours.size_bytes / ours.save(number + 1)["remote"]
                    elif kind == "iperf3 -l 1M":
                        times[kind] = iperf3.bytes_per_s()
                    else:
                        times[kind] = pipe.bytes_per_s(hashed=kind == "with checksums")
                if number >= 2:
                    for kind, rate in times.items():
                        rates[kind].append(rate)
        finally:
            pipe.close()
            ours.close()
            iperf3.close()
    return dict(rates)


class _Pipe:
    """Another process with memory of its own, and connections to it."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = limits.warm_memory(size_bytes)
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, size_bytes), daemon=True)
        self._process.start()
        self._told = mine
        port = mine.recv()
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for sock in self._sockets:
            tune(sock)

    def bytes_per_s(self, *, hashed: bool) -> float:
        self._told.send(hashed)
        start = time.perf_counter()
        threads = [threading.Thread(target=self._send, args=(i, hashed)) for i in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self._told.recv() == "done"
        return len(self._memory) / (time.perf_counter() - start)

    def _send(self, first: int, hashed: bool) -> None:
        for offset in range(first * PIECE, len(self._memory), CONNECTIONS * PIECE):
            piece = self._memory[offset : offset + PIECE]
            if hashed:
                xxhash.xxh3_64_intdigest(piece)
            self._sockets[first].sendall(piece)

    def close(self) -> None:
        self._told.send(None)
        for sock in self._sockets:
            sock.close()
        self._process.join(10)


def _receive(told: Connection, size_bytes: int) -> None:
    memory = limits.warm_memory(size_bytes)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        told.send(listener.getsockname()[1])
        sockets = [listener.accept()[0] for _ in range(CONNECTIONS)]

    def take(first: int, hashed: bool) -> None:
        for offset in range(first * PIECE, size_bytes, CONNECTIONS * PIECE):
            digest = xxhash.xxh3_64()
            for start in range(offset, offset + PIECE, HASHED):
                piece = memory[start : start + HASHED]
                sockets[first].recv_into(piece, 0, socket.MSG_WAITALL)
                if hashed:
                    digest.update(piece)
            digest.intdigest()

    while (hashed := told.recv()) is not None:
        threads = [threading.Thread(target=take, args=(i, hashed)) for i in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told.send("done")
