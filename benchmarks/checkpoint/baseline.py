"""The published multi-level scheme, re-enacted, with a switch for each of its three optimizations.

Trainer: torch.save into a buffer, copy it, slice the copy, pickle each slice, send it over one connection.
Node (a process of its own, ``python -m benchmarks.checkpoint.baseline DIRECTORY``): receive, join the slices,
unpack (torch.load), repack (torch.save), write and fsync.

- Check-Mem: the trainer copies its tensors once into staging memory that is allocated and touched already.
- Check-Trans: two connections send straight from memory, and the node receives straight into a slot.
- Check-Pack: the node writes the bytes as they came.

Where the scheme leaves a choice, the baseline gets the faster one: training waits for torch.save alone and not for the
copy, which a thread makes; the node repacks straight into the file; connections are set up as deepvm's. Pickle is what
the scheme uses, so it is used here, and only here: between two processes of one benchmark, over loopback.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.limits import warm_memory
from benchmarks.common.workloads import State
from deepvm.protocol.sockets import tune

SLICE_BYTES = 4 * 2**20
PIECE_BYTES = 2**20
CONNECTIONS = 2
DEADLINE_S = 120
LENGTH = struct.Struct("!Q")
ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Switches:
    mem: bool = False
    trans: bool = False
    pack: bool = False

    @property
    def title(self) -> str:
        on = [f"Check-{name.capitalize()}" for name in ("mem", "trans", "pack") if getattr(self, name)]
        return " + ".join(on) or "none"


class Trainer:
    """The trainer's side, with its node. One save at a time, each with its own switches."""

    def __init__(self, state: State, directory: Path) -> None:
        self._state = state
        command = [sys.executable, "-m", "benchmarks.checkpoint.baseline", str(directory)]
        self._node = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._node.stdout is not None
        address = ("127.0.0.1", int(self._node.stdout.readline()))
        self._links = [socket.create_connection(address, timeout=DEADLINE_S) for _ in range(CONNECTIONS)]
        for link in self._links:
            tune(link)
        self._staging: memoryview | None = None

    @property
    def node_pid(self) -> int:
        return self._node.pid

    def save(self, step: int, switches: Switches) -> dict[str, float]:
        """Seconds from the start until training may go on, all bytes are in the node's memory, and on its disk."""
        start = time.perf_counter()
        if switches.mem:
            payload, layout = self._stage()
        else:
            buffer = io.BytesIO()
            torch.save(self._state.state_dict(), buffer)
            payload, layout = buffer.getbuffer(), None
        times = dict.fromkeys(("at_once", "long_step"), time.perf_counter() - start)
        worker = threading.Thread(target=self._send, args=(step, payload, layout, switches, start, times))
        worker.start()
        worker.join(DEADLINE_S)
        if "durable" not in times:
            raise RuntimeError(f"the baseline's node answered nothing within {DEADLINE_S} s")
        return times

    def _stage(self) -> tuple[memoryview, list[tuple[str, torch.dtype, torch.Size, int]]]:
        layout, size = [], 0
        tensors = self._state.tensors()
        for name, tensor in tensors.items():
            layout.append((name, tensor.dtype, tensor.shape, size))
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        if self._staging is None or len(self._staging) != size:
            self._staging = warm_memory(size)
        for (_, dtype, shape, offset), tensor in zip(layout, tensors.values(), strict=True):
            _view(self._staging, dtype, shape, offset).copy_(tensor)
        return self._staging, layout

    def _send(
        self,
        step: int,
        payload: memoryview,
        layout: Any,
        switches: Switches,
        start: float,
        times: dict[str, float],
    ) -> None:
        first = self._links[0]
        _send_pickled(first, {"step": step, "size": len(payload), "layout": layout, "switches": switches})
        if switches.trans:
            shares = [_share(len(payload), index) for index in range(CONNECTIONS)]
            senders = [
                threading.Thread(target=_send_pieces, args=(link, payload[low:high]))
                for link, (low, high) in zip(self._links, shares, strict=True)
            ]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join(DEADLINE_S)
        else:
            copy = bytes(payload)
            for index, offset in enumerate(range(0, len(copy), SLICE_BYTES)):
                _send_pickled(first, (step, index, copy[offset : offset + SLICE_BYTES]))
        for reached in ("remote", "durable"):
            assert _receive_pickled(first) == reached
            times[reached] = time.perf_counter() - start

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._node.wait(timeout=DEADLINE_S)


class Node:
    """The memory node's side."""

    def __init__(self, links: list[socket.socket], directory: Path) -> None:
        self._links = links
        self._directory = directory
        self._slot: memoryview | None = None

    def serve(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self._save(_receive_pickled(self._links[0]))

    def _save(self, announced: dict[str, Any]) -> None:
        first, size, switches = self._links[0], announced["size"], announced["switches"]
        data = self._into_slot(size) if switches.trans else self._joined(size)
        _send_pickled(first, "remote")
        path = self._directory / "baseline.pt"
        with path.open("wb") as file:
            if switches.pack:
                for offset in range(0, size, PIECE_BYTES):
                    file.write(memoryview(data)[offset : offset + PIECE_BYTES])
            else:
                torch.save(_unpacked(data, announced["layout"]), file)
            file.flush()
            os.fsync(file.fileno())
        _send_pickled(first, "durable")
        path.unlink()

    def _joined(self, size: int) -> bytes:
        slices: list[bytes] = []
        received = 0
        while received < size:
            _, _, data = _receive_pickled(self._links[0])
            slices.append(data)
            received += len(data)
        return b"".join(slices)

    def _into_slot(self, size: int) -> memoryview:
        if self._slot is None or len(self._slot) < size:
            self._slot = warm_memory(size)
        receivers = [
            threading.Thread(target=_receive_into, args=(link, self._slot[low:high]))
            for link, (low, high) in zip(self._links, (_share(size, i) for i in range(CONNECTIONS)), strict=True)
        ]
        for receiver in receivers:
            receiver.start()
        for receiver in receivers:
            receiver.join(DEADLINE_S)
        return self._slot[:size]


def _unpacked(data: bytes | memoryview, layout: Any) -> Any:
    if layout is None:
        return torch.load(io.BytesIO(data), weights_only=False)
    return {name: _view(data, dtype, shape, offset).clone() for name, dtype, shape, offset in layout}


def _view(memory: bytes | memoryview, dtype: torch.dtype, shape: torch.Size, offset: int) -> torch.Tensor:
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=offset).view(shape)


def _share(size: int, index: int) -> tuple[int, int]:
    return size * index // CONNECTIONS, size * (index + 1) // CONNECTIONS


def _send_pieces(link: socket.socket, data: memoryview) -> None:
    for offset in range(0, len(data), PIECE_BYTES):
        link.sendall(data[offset : offset + PIECE_BYTES])


def _send_pickled(link: socket.socket, value: Any) -> None:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    link.sendall(LENGTH.pack(len(data)))
    link.sendall(data)


def _receive_pickled(link: socket.socket) -> Any:
    length = LENGTH.unpack(_received(link, LENGTH.size))[0]
    return pickle.loads(_received(link, length))  # noqa: S301 - the scheme's own way, see above


def _received(link: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    _receive_into(link, memoryview(data))
    return data


def _receive_into(link: socket.socket, view: memoryview) -> None:
    offset = 0
    while offset < len(view):
        count = link.recv_into(view[offset : offset + PIECE_BYTES])
        if not count:
            raise EOFError
        offset += count


def main(directory: str) -> None:
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        print(listener.getsockname()[1], flush=True)
        links = [listener.accept()[0] for _ in range(CONNECTIONS)]
    Node(links, Path(directory)).serve()


if __name__ == "__main__":
    main(sys.argv[1])
