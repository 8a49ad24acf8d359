"""Tensors on a GPU, copied into staging memory while the GPU continues to compute.

Staging memory is registered with the driver once. Copies are enqueued on a side stream, which first waits for what the
current stream was given so far; every 64 MiB an event is recorded behind them. On the CPU only senders wait for a copy,
each of them for the events of its own chunk. On the GPU, the current stream waits:

- at once for tensors that no optimizer owns, since the next forward pass may change them;
- in the optimizer's pre-hook for those that only its step changes.

``Cuda`` is written from the documentation of CUDA and torch and **has never run on a GPU**; what is above it is tested
with a device that is a thread, and the tests of ``Cuda`` itself run wherever there is one.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch

from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.state.layout import DTYPES, Entry, Layout
from deepvm.errors import CheckpointError

log = logging.getLogger("deepvm.checkpoint")

GROUP_BYTES = 64 * 2**20  # copied between two events: 3 ms on PCIe 4, so that senders start early and events stay few
ARRIVE_S = 600.0  # no copy takes longer; a device that needs more is lost
POLL_S = 0.0002
versions_of = attrgetter("_version")
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


class DeviceEvent(Protocol):
    """A mark in a stream."""

    def query(self) -> bool:
        """True if everything before it is done. Does not wait."""
        ...


class Device(Protocol):
    """The operations of a kind of GPU. A side stream belongs to each of its devices."""

    def has(self, tensor: torch.Tensor) -> bool: ...

    def register(self, address: int, size_bytes: int) -> None:
        """Pin memory, so that copies into it need no CPU."""
        ...

    def unregister(self, address: int) -> None: ...

    def follow(self, device: torch.device) -> None:
        """Let the side stream wait for what the current one was given so far."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on the side stream of the source's device, and keep the source's memory until it is done."""
        ...

    def record(self, device: torch.device) -> DeviceEvent:
        """Mark the side stream behind all copies so far."""
        ...

    def hold(self, device: torch.device, event: DeviceEvent) -> None:
        """Let the current stream wait for a mark of the side stream. The CPU does not wait."""
        ...


class Cuda:
    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def register(self, address: int, size_bytes: int) -> None:
        self._call("cudaHostRegister", address, size_bytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def follow(self, device: torch.device) -> None:
        self._stream(device).wait_stream(torch.cuda.current_stream(device))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._stream(source.device)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        source.record_stream(stream)

    def record(self, device: torch.device) -> DeviceEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream(device))
        return event

    def hold(self, device: torch.device, event: Any) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    @staticmethod
    def _call(name: str, *arguments: int) -> None:
        code = int(getattr(torch.cuda.cudart(), name)(*arguments))  # type: ignore[no-untyped-call]
        if code != 0:
            raise CheckpointError(f"{name} failed with error {code}")


class Arrivals:
    """The copies of one snapshot. Groups are (start, end) in the file, and the event after which they are there."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._groups: list[tuple[int, int, DeviceEvent]] = []
        self._held: dict[torch.device, DeviceEvent] = {}  # each device's last, until the current stream waits for it
        self._owned: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []

    def add(self, start: int, end: int, where: torch.device) -> None:
        event = self._device.record(where)
        self._groups.append((start, end, event))
        self._held[where] = event

    def watch(self, owned: Sequence[torch.Tensor]) -> None:
        """Tensors that may change only after ``hold``."""
        self._owned, self._versions = owned, list(map(versions_of, owned))

    def changed(self) -> bool:
        """True if one of them has changed already."""
        return list(map(versions_of, self._owned)) != self._versions

    def hold(self) -> None:
        """Let the current streams wait for all copies."""
        held, self._held = self._held, {}
        for where, event in held.items():
            self._device.hold(where, event)

    def wait(self, start: int, end: int) -> None:
        """Return once the bytes from ``start`` to ``end`` of the file have arrived."""
        deadline = time.monotonic() + ARRIVE_S
        for first, last, event in self._groups:
            while first < end and start < last and not event.query():
                if time.monotonic() > deadline:
                    raise CheckpointError(f"a copy from the GPU did not finish within {ARRIVE_S:g} s")
                time.sleep(POLL_S)


class DeviceCopies:
    """Copies of the tensors on one kind of device, save after save, into registered staging memory."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or Cuda()
        self._staging: Staging | None = None
        self._pinned = False
        self._last: Arrivals | None = None

    def takes(self, tensor: torch.Tensor) -> bool:
        return self._device.has(tensor)

    def start(
        self,
        staging: Staging,
        layout: Layout,
        loose: Sequence[tuple[int, torch.Tensor]],
        owned: Sequence[tuple[int, torch.Tensor]],
    ) -> Arrivals | None:
        """Enqueue the copies of tensors, by entry: those that anything may change, and those that only an optimizer's
        step changes. None if there is nothing to copy."""
        if not loose and not owned:
            return None
        self._register(staging)
        arrivals = Arrivals(self._device)
        for where in {tensor.device for _, tensor in [*loose, *owned]}:
            self._device.follow(where)
        self._enqueue(staging, layout, loose, arrivals)
        arrivals.hold()
        self._enqueue(staging, layout, owned, arrivals)
        arrivals.watch([tensor for _, tensor in owned])
        self._last = arrivals
        return arrivals

    def release(self) -> None:
        """Release staging memory, once nothing is copied into it any more."""
        staging, self._staging = self._staging, None
        last, self._last = self._last, None
        if last is not None:
            last.wait(0, sys.maxsize)
        if staging is not None and self._pinned:
            self._device.unregister(staging.address)
        self._pinned = False

    def _register(self, staging: Staging) -> None:
        if self._staging is staging:
            return
        self.release()
        self._staging = staging
        try:
            self._device.register(staging.address, staging.mapped_bytes)
            self._pinned = True
        except CheckpointError as error:  # copies still work, and make the CPU wait
            log.warning("staging memory is not pinned, saves will stall training: %s", error)

    def _enqueue(
        self, staging: Staging, layout: Layout, tensors: Sequence[tuple[int, torch.Tensor]], arrivals: Arrivals
    ) -> None:
        """Copy in the order of the file, device by device, with an event behind every group."""
        entries = layout.entries
        for where in sorted({tensor.device for _, tensor in tensors}, key=str):
            mine = [(entry, tensor) for entry, tensor in tensors if tensor.device == where and entries[entry].bytes]
            start = end = None
            for entry, tensor in sorted(mine, key=lambda pair: pair[0]):
                for offset, to, source in _pieces(staging, entries[entry], tensor):
                    self._device.copy(to, source)
                    start = offset if start is None else start
                    end = offset + to.numel() * to.element_size()
                    if end - start >= GROUP_BYTES:
                        arrivals.add(start, end, where)
                        start = None
            if start is not None and end is not None:
                arrivals.add(start, end, where)


def _pieces(staging: Staging, entry: Entry, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Divide a tensor into parts of at most one group: the offset in the file, the target and the source of each."""
    to = staging.tensor(entry.start, DTYPES[entry.dtype], entry.shape)
    if entry.bytes <= GROUP_BYTES or not tensor.is_contiguous():
        yield entry.start, to, tensor
        return
    to, source, step = to.view(-1), tensor.detach().view(-1), GROUP_BYTES // tensor.element_size()
    for at in range(0, source.numel(), step):
        yield entry.start + at * tensor.element_size(), to[at : at + step], source[at : at + step]
