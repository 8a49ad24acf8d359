"""The contract of every place that keeps checkpoints, and the manifest that makes one exist.

The bytes of a checkpoint are a safetensors file, cut into chunks of one size (the last may be shorter). A checkpoint
exists once its manifest does, and the manifest is written last. A run is a name; a step identifies a checkpoint in it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from deepvm import strict_json as strict
from deepvm.errors import Corrupt, UsageError
from deepvm.protocol.placement import Share

if TYPE_CHECKING:
    from deepvm.store.memory.store import MemoryStore

FORMAT = "deepvm-checkpoint/1"
DEFAULT_CHUNK_BYTES = 4 * 2**20
MOST_CHUNK_BYTES = 256 * 2**20  # readers hold several in memory
MOST_CHUNKS = 2**22  # 16 TiB in chunks of 4 MiB; a manifest with more is not ours
MOST_STEP = 2**63 - 1
MOST_WORLD_SIZE = 2**20
MOST_NODES = 4096
MOST_CREATED_S = 250e9  # the year 9892: later ones are not dates
MOST_FACTS_DEPTH = 32
MOST_FACTS = 200_000  # values in the facts; one list may have an entry for each rank and each tensor
MOST_MANIFEST_BYTES = 2 * 16 * MOST_CHUNKS + 16 * 2**20  # a memory node's part quotes the manifest of the whole
PART_OF = "part_of"  # the fact that quotes it
_MOST_DEPTH = 2 * MOST_FACTS_DEPTH + 4
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def is_run(name: object) -> bool:
    """True if a name may be a run's."""
    return isinstance(name, str) and _RUN.match(name) is not None


def check_run(run: str) -> str:
    if not is_run(run):
        rule = "use at most 100 letters, digits, '.', '_' and '-'"
        raise UsageError(f"{strict.brief(run)} is not a valid run name: {rule}")
    return run


def chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    return -(-size_bytes // chunk_bytes)


def chunk_span(chunk: int, size_bytes: int, chunk_bytes: int) -> tuple[int, int]:
    """Return offset and length of a chunk."""
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
        """Check the limits, which hold for every manifest: what is written can be read again."""
        check_run(self.run)
        try:
            self._check_numbers()
            self._check_nodes()
            self._check_facts()
        except strict.MalformedJson as error:
            raise Corrupt(f"a manifest's {error}") from None

    def _check_numbers(self) -> None:
        strict.integer(self.step, "step", 0, MOST_STEP)
        strict.integer(self.chunk_bytes, "chunk_bytes", 1, MOST_CHUNK_BYTES)
        strict.integer(self.size_bytes, "size_bytes", 1, MOST_CHUNKS * self.chunk_bytes)
        strict.number(self.created_s, "created_s", 0, MOST_CREATED_S)
        strict.integer(self.world_size, "world_size", 1, MOST_WORLD_SIZE)
        wanted = chunk_count(self.size_bytes, self.chunk_bytes)
        if len(self.digests) != wanted:
            raise Corrupt(f"a manifest of {self.size_bytes} bytes lists {len(self.digests)} chunks instead of {wanted}")

    def _check_nodes(self) -> None:
        if len(self.nodes) > MOST_NODES:
            raise Corrupt(f"a manifest lists {len(self.nodes)} memory nodes, at most {MOST_NODES} are allowed")
        for node in self.nodes:
            strict.text(node, "node", 300, least=1)
        strict.integer(self.replicas, "replicas", 1, max(1, len(self.nodes)))

    def _check_facts(self) -> None:
        if not isinstance(self.facts, Mapping):
            raise Corrupt(f"a manifest's facts are {strict.brief(self.facts)}, not an object")
        own = {name: fact for name, fact in self.facts.items() if name != PART_OF}
        for facts in (own, self.facts.get(PART_OF)):
            strict.check_plain(facts, "facts", most_depth=MOST_FACTS_DEPTH, most_values=MOST_FACTS)

    def span(self, chunk: int) -> tuple[int, int]:
        return chunk_span(chunk, self.size_bytes, self.chunk_bytes)

    def share(self, index: int) -> Share:
        """Return which chunks the memory node of this index keeps."""
        return Share(nodes=max(1, len(self.nodes)), index=index, replicas=self.replicas)

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
        """Parse a manifest: the only parser. Raise Corrupt if anything is wrong with it."""
        try:
            found = strict.loads(
                data, most_bytes=MOST_MANIFEST_BYTES, most_depth=_MOST_DEPTH, most_values=2 * MOST_FACTS + MOST_NODES
            )
            document = strict.table(found, "the document")
            if (format_ := strict.member(document, "format")) != FORMAT:
                raise Corrupt(f"a manifest has format {strict.brief(format_)}, this version reads {FORMAT!r}")
            values = {one.name: strict.member(document, one.name) for one in fields(cls)}
            values["digests"] = _digests(values["digests"])
            values["created_s"] = strict.number(values["created_s"], "created_s", 0, MOST_CREATED_S)
            values["nodes"] = tuple(strict.array(values["nodes"], "nodes", MOST_NODES))
            values["facts"] = strict.table(values["facts"], "facts")
            return cls(**values)
        except (strict.MalformedJson, UsageError) as error:
            raise Corrupt(f"a manifest cannot be read: {error}") from None


def _digests(found: Any) -> array[int]:
    digests = array("Q")
    try:
        data = bytes.fromhex(found)
        if 2 * len(data) != len(found):  # spaces are skipped, and are not ours
            raise ValueError
        digests.frombytes(data)
    except (TypeError, ValueError):
        shown = strict.brief(found)
        raise strict.MalformedJson(f"digests is {shown}, not 16 hexadecimal digits for each chunk") from None
    return digests


class Writer(Protocol):
    """Write one checkpoint into a store. Chunks may come in any order and from several threads."""

    def put(self, chunk: int, pieces: Sequence[memoryview], digest: int) -> None:
        """Store a chunk from one or more pieces of memory; return once they may change again."""
        ...

    def publish(self, manifest: Manifest) -> None:
        """Make the checkpoint exist: all chunks safe first, the manifest last."""
        ...

    def abort(self) -> None:
        """Leave nothing behind. Never raises; harmless after publish."""
        ...


@dataclass(frozen=True, kw_only=True)
class MappedBytes:
    """All bytes of a checkpoint as memory of this process. No chunk is verified yet."""

    view: memoryview  # private: what is written to it reaches no file and no other process


class Store(Protocol):
    """A place that keeps checkpoints. Every failure is a StoreError; every wait has a deadline.

    Derive a store from this class: capabilities that it does not have keep the defaults at the end.
    """

    @property
    def url(self) -> str: ...

    @property
    def durable(self) -> bool:
        """True if a checkpoint here outlives the loss of every machine of the cluster."""
        ...

    def runs(self) -> list[str]: ...

    def steps(self, run: str) -> list[int]:
        """Return the steps of which a whole checkpoint exists, ascending."""
        ...

    def manifest(self, run: str, step: int) -> Manifest: ...

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """Fill ``into`` (exactly the chunk's length) and verify its digest; Corrupt if no replica is good."""
        ...

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> Writer: ...

    def delete(self, run: str, step: int) -> None:
        """Remove a checkpoint, the manifest first. It may be missing."""
        ...

    def close(self) -> None: ...

    # --- capabilities ---------------------------------------------------------------------------------------------

    @property
    def parallel_reads(self) -> int | None:
        """The number of chunks to read at once; None if the store has no preference."""
        return None

    def memory_nodes(self) -> MemoryStore | None:
        """Return the memory nodes that this store consists of: all ranks upload to them, and they write back."""
        return None

    def map(self, manifest: Manifest) -> MappedBytes | None:  # noqa: ARG002
        """Return a checkpoint's bytes as memory; None if reading its chunks is faster."""
        return None

    def origin(self, manifest: Manifest) -> str:  # noqa: ARG002
        """Return the URL of the store that keeps a checkpoint: this one, unless it was prefetched from another."""
        return self.url

    def is_prefetched(self, manifest: Manifest) -> bool:  # noqa: ARG002
        """True if a checkpoint is, or is about to be, in this machine's memory."""
        return False
