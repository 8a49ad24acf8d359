"""A memory node in a network of its own, behind a link that can be cut, healed and slowed. Only root may make one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

TOKEN = "of the chaos tests"
DEEPVM = str(Path(sys.executable).with_name("deepvm"))


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


class FarNode:
    def __init__(self, number: int) -> None:
        self.name = f"dvm{os.getpid() % 100000}x{number}"
        self._here, self._there = f"{self.name}a"[-15:], f"{self.name}b"[-15:]
        self._net = f"10.{200 + number}.{os.getpid() % 250}"
        self.address = f"{self._net}.2:7070"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"memory://{self.address}"

    def start(self, directory: Path, capacity: str) -> None:
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self.name)
        run("ip", "addr", "add", f"{self._net}.1/24", "dev", self._here)
        run("ip", "link", "set", self._here, "up")
        self._inside("ip", "addr", "add", f"{self._net}.2/24", "dev", self._there)
        self.heal()
        token, ready = directory / f"{self.name}.token", directory / f"{self.name}.ready"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, DEEPVM, "memory-node", "--listen", self.address, "--capacity", capacity,
             "--block", "256KiB", "--token-file", str(token), "--ready-file", str(ready)],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(ready.exists, "the node's start", timeout_s=30)

    def _inside(self, *words: str) -> None:
        run("ip", "netns", "exec", self.name, *words)

    def await_bytes(self, count: int) -> None:
        """Until so many more have gone to the node."""
        sent = Path(f"/sys/class/net/{self._here}/statistics/tx_bytes")
        enough = int(sent.read_text()) + count
        wait_until(lambda: int(sent.read_text()) >= enough, f"{count} bytes")

    def cut(self) -> None:
        self._inside("ip", "link", "set", self._there, "down")

    def heal(self) -> None:
        self._inside("ip", "link", "set", self._there, "up")

    def slow_down(self, rate: str) -> None:
        run("tc", "qdisc", "add", "dev", self._here, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")

    def remove(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
        for words in (("link", "del", self._here), ("netns", "del", self.name)):
            subprocess.run(["ip", *words], check=False, capture_output=True, timeout=20)


@contextmanager
def far_nodes(directory: Path, count: int = 1, capacity: str = "128MiB") -> Iterator[list[FarNode]]:
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    made: list[FarNode] = []
    try:
        for number in range(count):
            made.append(FarNode(number))
            try:
                made[-1].start(directory, capacity)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)!r}")
        yield made
    finally:
        for node in made:
            node.remove()
