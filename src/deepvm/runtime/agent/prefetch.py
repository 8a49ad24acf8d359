"""A run's stores -> ``deepvm-fetch``, which prefetches the newest checkpoint while a machine's trainers start."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from deepvm import variables
from deepvm.fetch import segment_files

log = logging.getLogger("deepvm.runtime")

END_S = 5.0  # for a fetcher to end after SIGTERM


def store_urls(nodes: Sequence[str], durable: str | None, replicas: int = 1) -> list[str]:
    """Return the stores with a run's checkpoints, nearest first."""
    kept = min(replicas, len(nodes))
    memory = f"memory://{','.join(nodes)}" + (f"?replicas={kept}" if kept > 1 else "")
    return [*([memory] if nodes else []), *([durable] if durable else [])]


def segment_of(folder: Path) -> Path:
    """Return the segment of the machine with this folder: one host may run several machines."""
    return segment_files.default_path(
        f"machine-{hashlib.blake2s(os.fsencode(folder.absolute()), digest_size=8).hexdigest()}"
    )


class Prefetcher:
    """Runs one ``deepvm-fetch`` at a time, which ends when the trainers have the checkpoint. If it fails, trainers read
    from the stores themselves."""

    def __init__(self, folder: Path, run: str, *, token: str, durable: str | None) -> None:
        self.path = segment_of(folder)
        self._log, self._run, self._durable = folder / "fetch.txt", run, durable
        self._environment = {**os.environ, variables.TOKEN: token}
        self._lock = threading.Lock()
        self._fetcher: subprocess.Popen[bytes] | None = None
        self._closed = False

    def begin(self, nodes: Sequence[str]) -> None:
        """Prefetch the newest checkpoint, and drop one that was prefetched earlier and not read."""
        urls = store_urls(nodes, self._durable)
        with self._lock:
            self._end()
            if urls and not self._closed:
                try:
                    self._fetcher = self._start(urls)
                except OSError as error:
                    log.warning("no checkpoint is prefetched: %s", error)

    def _start(self, urls: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "deepvm.fetch", "--run", self._run, "--into", str(self.path), *urls]
        fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(fd, "ab") as out:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self._environment)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is None:
            return
        fetcher.terminate()
        try:
            fetcher.wait(END_S)
        except subprocess.TimeoutExpired:
            fetcher.kill()
            fetcher.wait()
            segment_files.remove(self.path)
