"""What the fuzzer gives to our parsers of documents. Each raises only its documented error, and what it accepts it can
write and read again."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from deepvm.checkpoint.state.documents import skeleton_of_rank, witness_rows
from deepvm.checkpoint.state.layout import read_header
from deepvm.errors import Corrupt, DeepvmError, UsageError
from deepvm.events import Event
from deepvm.fetch.segment import About, Head, State
from deepvm.runtime.cluster import load_cluster
from deepvm.store.base import PART_OF, Manifest
from deepvm.store.safetensors import parse_header

WITNESS = "deepvm-witness/1"


@dataclass(frozen=True)
class Target:
    """``one`` takes an input; whatever it raises is a finding."""

    one: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    runs: int


def check_message(error: DeepvmError) -> None:
    """That an error can be shown to anybody."""
    text = str(error)
    assert text, "an error without a word"
    assert all(c.isprintable() or c == "\n" for c in text), ascii(text)


def manifest() -> Manifest:
    facts = {"torch": "2.13", "state": ["model"], "loaders_outside": 0, "rate": 0.5, "deterministic": True}
    return Manifest(
        run="run-a", step=12, size_bytes=300, chunk_bytes=128, digests=[1, 2, 3], created_s=1.7e9, world_size=2,
        nodes=("10.0.0.9:7070", "[::1]:7071"), replicas=2, facts=facts,
    )  # fmt: skip


def one_manifest(data: bytes) -> None:
    try:
        found = Manifest.from_bytes(data)
    except Corrupt as error:
        check_message(error)
        return
    numbers = (found.step, found.size_bytes, found.chunk_bytes, found.world_size, found.replicas)
    assert {type(number) for number in numbers} == {int}, numbers
    assert type(found.created_s) is float
    assert type(found.facts) is dict
    again = Manifest.from_bytes(found.to_bytes())
    assert list(again.digests) == list(found.digests)
    assert (again.run, again.step, again.facts) == (found.run, found.step, found.facts)
    assert sum(found.span(chunk)[1] for chunk in range(len(found.digests))) == found.size_bytes


def manifests() -> list[bytes]:
    whole = manifest()
    part = Manifest(
        run="run-a", step=12, size_bytes=128, chunk_bytes=128, digests=[2], created_s=1.0,
        facts={PART_OF: json.loads(whole.to_bytes()), "node_index": 1},
    )  # fmt: skip
    return [whole.to_bytes(), part.to_bytes()]


def header_file(document: object, tail: int) -> bytes:
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + bytes(tail)


def one_header(data: bytes) -> None:
    if len(data) >= 16 and data[0] % 2:  # so that most inputs have a length that fits
        end = data.rfind(b"}") + 1
        if end > 8:
            data = struct.pack("<Q", end - 8) + data[8:]
    try:
        found = parse_header(data, len(data))
    except Corrupt as error:
        check_message(error)
    else:
        end = 8 + int.from_bytes(data[:8], "little")
        assert end + sum(tensor.size_bytes for tensor in found.tensors) == len(data)
        assert all(type(n) is int and n >= 0 for tensor in found.tensors for n in tensor.shape)
    with contextlib.suppress(Corrupt):
        read_header(data, len(data))


def headers() -> list[bytes]:
    tensors = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BOOL", "shape": [], "data_offsets": [24, 25]},
        "c": {"dtype": "I64", "shape": [0, 7], "data_offsets": [25, 25]},
    }
    return [
        header_file({"__metadata__": {"format": "pt", "skeleton": "[{}]"}, **tensors}, 25),
        header_file({}, 0),
        header_file(tensors, 25),
    ]


def one_state(data: bytes) -> None:
    text = data.decode("latin-1")
    for read in (
        lambda: skeleton_of_rank({"skeleton": text}, 1),
        lambda: witness_rows({"format": WITNESS, "witness": text}, WITNESS, 3),
    ):
        with contextlib.suppress(Corrupt):
            read()


def states() -> list[bytes]:
    skeleton = [{"net": {"$module": {"w": {"$tensor": "net.w"}}, "versions": {"": {"version": 1}}}, "best": 1.5}] * 2
    witness = {"step": 3, "after": 4, "ranks": [{"net.w": "00ff"}, {}]}
    return [json.dumps(skeleton).encode(), json.dumps(witness).encode()]


@cache
def plan_file() -> int:
    return os.memfd_create("plan.json")


def one_plan(data: bytes) -> None:
    os.truncate(plan_file(), 0)
    os.pwrite(plan_file(), data, 0)
    try:
        found = load_cluster(f"/proc/self/fd/{plan_file()}")
    except UsageError as error:
        check_message(error)
        return
    assert len(found.machines) <= 10_000
    assert found.hourly_usd >= 0
    assert all(type(machine.usd_per_hour) is float and machine.instance.isprintable() for machine in found.machines)


def plans() -> list[bytes]:
    role = {
        "role": "worker", "instance": "g4dn.xlarge", "market": "spot", "count": 3, "region": "us-east-1", "zone": None,
        "usd_per_hour": 0.16, "usd_low": None, "usd_high": None, "price_seen": "2026-08-01",
    }  # fmt: skip
    document = {
        "format": "deepvm-plan/1",
        "catalog": "aws-2026-08",
        "request": {"checkpoint_bytes": 10**9},
        "instances": [{"instance": "g4dn.xlarge", "on_demand_usd": 0.526}],
        "recommendations": [
            {
                "rank": 1,
                "architecture": "tiering",
                "roles": [role, {**role, "role": "memory", "market": "on-demand", "count": 1}],
                "restore": {"on_demand_total_s": 2.5},
            }
        ],
    }
    return [json.dumps(document).encode()]


def one_segment(data: bytes) -> None:
    with contextlib.suppress(Corrupt):
        Head.from_bytes(data[: len(heads()[0])])
    with contextlib.suppress(Corrupt):
        About.from_bytes(data)


def heads() -> list[bytes]:
    filling = Head(
        state=State.FILLING,
        pid=7,
        pid_started_ticks=9,
        about_bytes=500,
        chunks=3,
        data_offset=2 * 2**20,
        size_bytes=300,
    )
    return [filling.to_bytes(), Head(state=State.CHOOSING, pid=1, pid_started_ticks=2).to_bytes()]


def segments() -> list[bytes]:
    about = About(store="memory://10.0.0.9:7070", passed_over=("step 3: gone",), manifest=manifest())
    return [*heads(), about.to_bytes()]


def one_event(data: bytes) -> None:
    for read in (Event.from_line, Event.from_trainer):
        try:
            found = read(data)
        except ValueError:
            continue
        assert Event.from_line(found.to_line()) == found


def events() -> list[bytes]:
    step = Event(at_s=1.7e9, kind="step", machine="worker/0", data={"step": 3, "seconds": 0.1, "world_size": 2})
    save = Event(at_s=1.7e9, kind="save", data={"step": 3, "state": "remote", "stall_s": 0.1, "why": None})
    return [step.to_line().encode(), save.to_line().encode()]


TARGETS = {
    "manifest": Target(one_manifest, manifests, 250_000),
    "header": Target(one_header, headers, 250_000),
    "state": Target(one_state, states, 100_000),
    "plan": Target(one_plan, plans, 100_000),
    "segment": Target(one_segment, segments, 100_000),
    "event": Target(one_event, events, 100_000),
}
