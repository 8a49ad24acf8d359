"""What a memory node is told when it starts, checked at birth."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deepvm.errors import UsageError
from deepvm.memnode.peer_rule import PeerRule
from deepvm.protocol import frames
from deepvm.protocol.addresses import split_address
from deepvm.protocol.sockets import is_loopback
from deepvm.store.base import DEFAULT_CHUNK_BYTES
from deepvm.units import format_bytes

if TYPE_CHECKING:
    from deepvm.store.base import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one client, or all of them, may take."""

    connections: int = 256  # of clients that have shown the token
    connections_of_a_host: int = 192  # of them
    handshakes: int = 64  # connections that have not shown it yet
    runs: int = 1000
    handshake_s: float = 5.0
    frame_s: float = 60.0  # a frame that has begun arrives, or an answer is taken, within this: 8 MiB at 1 Mbit/s
    idle_s: float = 6 * 3600.0  # between frames; trainers are silent between saves
    upload_idle_s: float = 300.0  # an upload that nobody touches any more gives its memory back
    room_s: float = 2.0  # how long a new upload waits for blocks that are still being read
    stop_s: float = 10.0  # uploads in progress may finish when the node stops
    flush_s: float = 30.0  # and what is committed may reach the disk
    documents_bytes: int = 256 * 2**20  # of all clients together, on their way in
    document_piece_s: float = 5.0  # for each MiB of a large one, so that a slow client does not hold the others up
    failure_delay_s: float = 0.3  # before a wrong proof is answered


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    listen: str = "127.0.0.1:0"
    advertise: tuple[str, ...] = ()  # where clients reach it through a forwarded port or NAT, beside its own addresses
    capacity_bytes: int
    block_bytes: int = DEFAULT_CHUNK_BYTES
    buffers: int = 2  # checkpoints of a run in memory, the one in progress included
    token: str | None = field(default=None, repr=False)
    spill: Path | str | None = None
    spill_keep: int | None = None  # checkpoints of a run in the spill directory; as many as buffers unless told
    durable: Store | str | None = None
    durable_keep: int | None = None  # all, unless told
    tls_cert: Path | str | None = None
    tls_key: Path | str | None = None
    metrics: str | None = None  # HOST:PORT
    peers: tuple[
        str, ...
    ] = ()  # nodes that it may dial: hosts, addresses or networks; those of its own kind unless told
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        host, _ = split_address(self.listen, listen=True)
        for address in self.advertise:
            split_address(address)
        if not frames.LEAST_BLOCK_BYTES <= self.block_bytes <= frames.MOST_BLOCK_BYTES or self.block_bytes % 4096:
            raise UsageError(
                f"a block of {self.block_bytes} bytes: take a multiple of 4096 from "
                f"{frames.LEAST_BLOCK_BYTES} to {frames.MOST_BLOCK_BYTES}"
            )
        if self.capacity_bytes < self.block_bytes:
            raise UsageError(
                f"a capacity of {format_bytes(self.capacity_bytes)} holds no block of {format_bytes(self.block_bytes)}"
            )
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.capacity_bytes > machine_bytes:
            raise UsageError(
                f"a capacity of {format_bytes(self.capacity_bytes)} is more than the {format_bytes(machine_bytes)} "
                "of memory that this machine has"
            )
        for name, count in (
            ("buffers", self.buffers),
            ("spill-keep", self.spill_keep),
            ("durable-keep", self.durable_keep),
        ):
            if count is not None and count < 1:
                raise UsageError(f"{name} is {count}: at least one checkpoint must be kept")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")
        PeerRule(host, self.peers)
        if self.token == "":
            raise UsageError("the token is empty: put some random text into its file")
        if self.token is None and not is_loopback(host):
            raise UsageError(
                f"without a token the node listens on loopback only, not on {host}: give --token-file or DEEPVM_TOKEN"
            )

    @property
    def incoming_documents_bytes(self) -> int:
        return min(self.limits.documents_bytes, max(frames.MOST_DOCUMENT_BYTES, self.capacity_bytes))

    @property
    def kept_documents_bytes(self) -> int:
        """Manifests and ranks' states, beside the capacity; at least what one rank may send, kept twice."""
        return max(40 * 2**20, self.capacity_bytes // 4)

    @property
    def kept_in_spill(self) -> int:
        return self.buffers if self.spill_keep is None else self.spill_keep
