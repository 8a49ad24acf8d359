"""The contract of every place that keeps checkpoints, and the manifest that makes one exist.

The bytes of a checkpoint are a safetensors file, cut into chunks of one size (the last may be shorter). A checkpoint
exists once its manifest does, and the manifest is written last. A run is a name; a step identifies a checkpoint in it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepvm.errors import Corrupt, UsageError

FORMAT = "deepvm-checkpoint/1"
DEFAULT_CHUNK_BYTES = 4 * 2**20
MOST_CHUNKS = 2**22  # 16 TiB in chunks of 4 MiB; a manifest that says more is not ours
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def check_run(run: str) -> str:
    if not _RUN.match(run):
        raise UsageError(f"{run!r} cannot name a run: letters, digits, dots and dashes, 100 at most")
    return run


def chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    return -(-size_bytes // chunk_bytes)


def chunk_span(chunk: int, size_bytes: int, chunk_bytes: int) -> tuple[int, int]:
    """Offset and length of a chunk."""
    offset = chunk * chunk_bytes
    return offset, min(chunk_bytes, size_bytes - offset)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is made of. ``digests`` are xxh3-64 of the chunks, in order."""

    run: str
    step: int
    size_bytes: int
    chunk_bytes: int
    digests: Sequence[int]
    created_s: float  # seconds since the epoch
    world_size: int = 1
    nodes: tuple[str, ...] = ()  # memory nodes that share the chunks: chunk k and its replicas at k, k+1 ... mod len
    replicas: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)  # versions, threads, state names: for people and checks

    def __post_init__(self) -> None:
        check_run(self.run)
        if self.step < 0 or self.size_bytes <= 0 or self.chunk_bytes <= 0:
            raise Corrupt(f"a manifest of step {self.step}, {self.size_bytes} bytes in chunks of {self.chunk_bytes}")
        if len(self.digests) != chunk_count(self.size_bytes, self.chunk_bytes):
            raise Corrupt(f"a manifest of {self.size_bytes} bytes lists {len(self.digests)} chunks")

    def span(self, chunk: int) -> tuple[int, int]:
        return chunk_span(chunk, self.size_bytes, self.chunk_bytes)

    def to_bytes(self) -> bytes:
        document = {
            "format": FORMAT,
            "run": self.run,
            "step": self.step,
            "size_bytes": self.size_bytes,
            "chunk_bytes": self.chunk_bytes,
            "created_s": self.created_s,
            "world_size": self.world_size,
            "nodes": list(self.nodes),
            "replicas": self.replicas,
            "facts": self.facts,
            "digests": array("Q", self.digests).tobytes().hex(),
        }
        return json.dumps(document, indent=1, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        try:
            document = json.loads(data)
            if document["format"] != FORMAT:
                raise Corrupt(f"a manifest has format {document['format']!r}, this version reads {FORMAT!r}")
            if not 0 < document["size_bytes"] <= MOST_CHUNKS * document["chunk_bytes"]:
                raise Corrupt(f"a manifest claims {document['size_bytes']} bytes")
            digests = array("Q")
            digests.frombytes(bytes.fromhex(document["digests"]))
            return cls(
                run=document["run"],
                step=document["step"],
                size_bytes=document["size_bytes"],
                chunk_bytes=document["chunk_bytes"],
                digests=digests,
                created_s=float(document["created_s"]),
                world_size=document["world_size"],
                nodes=tuple(document["nodes"]),
                replicas=document["replicas"],
                facts=document["facts"],
            )
        except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
            raise Corrupt(f"a manifest cannot be read: {type(error).__name__} {error}") from None


class Writer(Protocol):
    """One checkpoint on its way into a store. Chunks may come in any order and from several threads."""

    def put(self, chunk: int, pieces: Sequence[memoryview], digest: int) -> None:
        """Store a chunk, given as one or more pieces of memory; returns once they may change again."""
        ...

    def publish(self, manifest: Manifest) -> None:
        """Make the checkpoint exist: all chunks safe first, the manifest last."""
        ...

    def abort(self) -> None:
        """Leave nothing behind. Never raises; harmless after publish."""
        ...


class Store(Protocol):
    """A place that keeps checkpoints. Every failure is a StoreError; every wait has a deadline."""

    @property
    def url(self) -> str: ...

    @property
    def durable(self) -> bool:
        """Whether a checkpoint here outlives the loss of every machine of the cluster."""
        ...

    def runs(self) -> list[str]: ...

    def steps(self, run: str) -> list[int]:
        """The steps of which a whole checkpoint exists, ascending."""
        ...

    def manifest(self, run: str, step: int) -> Manifest: ...

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """Fill ``into`` (exactly the chunk's length) and verify its digest; Corrupt where no copy is good."""
        ...

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> Writer: ...

    def delete(self, run: str, step: int) -> None:
        """Remove a checkpoint, the manifest first. One that is not there is no error."""
        ...

    def close(self) -> None: ...
