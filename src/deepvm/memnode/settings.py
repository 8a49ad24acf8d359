"""The settings of a memory node, checked when they are made: options of the command line in, valid values out."""

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
    """Limits for one client, or for all of them."""

    connections: int = 256  # of clients that have proved the token
    connections_of_a_host: int = 192  # of them
    handshakes: int = 64  # connections that have not proved it yet
    runs: int = 1000
    handshake_s: float = 5.0  # in all, TLS included
    frame_s: float = 60.0  # a frame that has begun arrives, or an answer is taken, within this and 8 s for each MB
    first_request_s: float = 30.0  # from the handshake to the first frame: clients ask at once
    idle_s: float = 6 * 3600.0  # between frames; trainers are silent between saves
    silent_s: float = 60.0  # after it, a client may lose its place to another one, if all places are taken
    upload_idle_s: float = 300.0  # an upload without any request for this long is dropped
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
    spill_keep: int | None = None  # checkpoints of a run in the spill directory; by default as many as buffers
    durable: Store | str | None = None
    durable_keep: int | None = None  # by default all
    tls_cert: Path | str | None = None
    tls_key: Path | str | None = None
    metrics: str | None = None  # HOST:PORT
    peers: tuple[str, ...] = ()  # hosts, addresses or networks of nodes that it may dial; by default like its own
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        host, _ = split_address(self.listen, listen=True)
        for address in self.advertise:
            split_address(address)
        if not frames.LEAST_BLOCK_BYTES <= self.block_bytes <= frames.MOST_BLOCK_BYTES or self.block_bytes % 4096:
            raise UsageError(
                f"block_bytes is {self.block_bytes}: it must be a multiple of 4096 from "
                f"{frames.LEAST_BLOCK_BYTES} to {frames.MOST_BLOCK_BYTES}"
            )
        capacity, block = format_bytes(self.capacity_bytes), format_bytes(self.block_bytes)
        if self.capacity_bytes < self.block_bytes:
            raise UsageError(f"a capacity of {capacity} is less than one block of {block}: raise --capacity")
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.capacity_bytes > machine_bytes:
            raise UsageError(
                f"a capacity of {capacity} is more than the {format_bytes(machine_bytes)} of memory of this machine"
            )
        kept = {"buffers": self.buffers, "spill-keep": self.spill_keep, "durable-keep": self.durable_keep}
        for name, count in kept.items():
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
        """For manifests and ranks' states, beside the capacity; at least what one rank may send, twice."""
        return max(40 * 2**20, self.capacity_bytes // 4)

    @property
    def kept_in_spill(self) -> int:
        return self.buffers if self.spill_keep is None else self.spill_keep
