"""The format of a segment: one checkpoint in shared memory, in a file that ``segment_writer`` fills while several
processes read it (``segment_reader``). ``segment_files`` says where it is.

    0       magic "DVMSEG1" + 0 · version u32 · state u32 · the writer's pid u64 and its start u64 (ticks since boot) ·
            length of about u64 · chunks u64 · offset of the data u64 · size of the data u64 ·
            when the writer started, chose a checkpoint, and ended: 3 × f64, seconds since boot
    2048    a byte for each rank of this machine: 1 once the rank no longer needs the segment
    4096    about: a JSON document with the store it comes from, what was passed over, and the manifest as text
    then    a byte for each chunk: 1 once the chunk has arrived and is verified
    then, at a multiple of 2 MiB, the bytes of the checkpoint

All numbers are little-endian. The writer holds an exclusive flock while it lives, so that readers see its death at
once. It writes everything else before the state that announces it. Readers copy the bytes: if they mapped them to
write, as the only rank of a machine did before version 2, two of them, or one and its forked child, would train on one
state.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from enum import IntEnum

from deepvm import strict_json as strict
from deepvm.errors import Corrupt
from deepvm.store.base import Manifest

MAGIC, VERSION = b"DVMSEG1\0", 2
PATH_VARIABLE = "DEEPVM_FETCHED"
PAGE_BYTES = 4096
ALIGN_BYTES = 2 * 2**20  # a huge page, if shared memory has them; the gap before is a hole in the file
RANKS_OFFSET = 2048
MOST_RANKS = PAGE_BYTES - RANKS_OFFSET
_STATE_OFFSET = 12
MOST_ABOUT_BYTES = 256 * 2**20
_HEAD = struct.Struct("<8sII6Q3d")


class State(IntEnum):
    CHOOSING = 1  # a writer is at work, and has not chosen a checkpoint yet
    FILLING = 2
    WHOLE = 3
    FAILED = 4  # given up: no more chunks arrive


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first bytes."""

    state: State
    pid: int
    pid_started_ticks: int
    about_bytes: int = 0
    chunks: int = 0
    data_offset: int = 0
    size_bytes: int = 0
    started_s: float = 0.0
    chosen_s: float = 0.0
    whole_s: float = 0.0

    @property
    def flags_offset(self) -> int:
        return PAGE_BYTES + self.about_bytes

    def to_bytes(self) -> bytes:
        return _HEAD.pack(
            MAGIC, VERSION, self.state, self.pid, self.pid_started_ticks, self.about_bytes, self.chunks,
            self.data_offset, self.size_bytes, self.started_s, self.chosen_s, self.whole_s,
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes) -> Head:
        try:
            magic, version, state, pid, ticks, about, chunks, offset, size, *times = _HEAD.unpack(data)
        except struct.error:
            raise Corrupt("a fetched segment has no header yet") from None
        if magic != MAGIC or version != VERSION:
            raise Corrupt(f"a fetched segment begins with {magic!r}, version {version}; this reads version {VERSION}")
        try:
            head = cls(
                state=State(state), pid=pid, pid_started_ticks=ticks, about_bytes=about, chunks=chunks,
                data_offset=offset, size_bytes=size, started_s=times[0], chosen_s=times[1], whole_s=times[2],
            )  # fmt: skip
        except ValueError:
            raise Corrupt(f"a fetched segment has an unknown state {state}") from None
        if head.state is not State.CHOOSING and (
            about > MOST_ABOUT_BYTES or offset % ALIGN_BYTES or offset < head.flags_offset + chunks
        ):
            raise Corrupt(f"a fetched segment puts its data at {offset}, behind {about} bytes of text, {chunks} chunks")
        return head


def read_head(fd: int) -> Head:
    return Head.from_bytes(os.pread(fd, _HEAD.size, 0))


def read_state(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 4, _STATE_OFFSET), "little")


def write_state(fd: int, state: State) -> None:
    os.pwrite(fd, state.to_bytes(4, "little"), _STATE_OFFSET)


@dataclass(frozen=True, kw_only=True)
class About:
    """The description of the checkpoint in a segment."""

    store: str  # where it comes from
    passed_over: tuple[str, ...]  # newer checkpoints that could not be used, and why
    manifest: Manifest

    def to_bytes(self) -> bytes:
        manifest = self.manifest.to_bytes().decode()
        return json.dumps({"store": self.store, "passed_over": self.passed_over, "manifest": manifest}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> About:
        try:
            found = strict.loads(data, most_bytes=MOST_ABOUT_BYTES, most_depth=2)
            document = strict.table(found, "the document")
            store = strict.text(strict.member(document, "store"), "store", 4096)
            passed_over = strict.array(strict.member(document, "passed_over"), "passed_over", 10_000)
            for problem in passed_over:
                if type(problem) is not str:
                    raise strict.MalformedJson(f"passed_over has {strict.brief(problem)}, which is not text")
            text = strict.member(document, "manifest")
            if type(text) is not str:
                raise strict.MalformedJson(f"manifest is {strict.brief(text)}, not text")
        except strict.MalformedJson as error:
            raise Corrupt(f"the description in a fetched segment cannot be read: {error}") from None
        return cls(store=store, passed_over=tuple(passed_over), manifest=Manifest.from_bytes(text.encode()))


def data_offset(about_bytes: int, chunks: int) -> int:
    return -(-(PAGE_BYTES + about_bytes + chunks) // ALIGN_BYTES) * ALIGN_BYTES
