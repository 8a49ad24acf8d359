"""Memory nodes forked from a process that has imported all they need: real processes, to be killed, that start at once.

For every line on stdin, a spill directory, a node is forked; it tells its process and address on stdout. The next line
is read when that node has ended.
"""

from __future__ import annotations

import os
import signal
import sys

from deepvm.memnode import Limits, MemoryNode


def main() -> None:
    while spill := sys.stdin.readline().strip():
        pid = os.fork()
        if pid == 0:
            serve(spill)
        os.waitpid(pid, 0)
        print("ended", flush=True)


def serve(spill: str) -> None:
    limits = Limits(failure_delay_s=0.01)
    node = MemoryNode(capacity_bytes=64 * 2**20, block_bytes=2**16, spill=spill, limits=limits)
    node.start()
    print(os.getpid(), node.address, flush=True)
    signal.sigwait([signal.SIGTERM])
    os._exit(0)


if __name__ == "__main__":
    main()
