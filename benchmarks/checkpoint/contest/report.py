"""Telling what the contest found: ratios against their targets, tables, and notes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import Measurement, Table, measurement
from benchmarks.checkpoint.contest.contest import (
    FOREIGN,
    GIB,
    LIMITS,
    LOCAL,
    OURS,
    PUBLISHED,
    Measured,
    switch_settings,
)

# Contestant -> what its users should know of its figures.
REMARKS = {
    "torch.save": "no fsync of its own: training waits for the page cache, durable is with fsync added",
    "safetensors": "as torch.save",
    "DLRover": "into shared memory of the same machine, which dies with it; fsync added",
    "torch_checkpointing": "fsync added",
    "torchsnapshot": "fsync added",
    "lm-resiliency": "remote is the memory of another training rank",
    "torchft HTTP": "remote is the memory of another training rank, which fetches; nothing on disk",
}


def measurements(found: Measured) -> list[Measurement]:
    if not found.samples[OURS]:
        return []
    w, size = found.workload, found.size_bytes
    told = []

    def ratio(what: str, over: Sequence[float], under: Sequence[float], **target: Any) -> None:
        pairs = list(zip(over, under, strict=False))  # of the same round
        if pairs:
            told.append(measurement(f"{w.title}: {what}", [a / b for a, b in pairs], unit="times", **target))

    def target(**wanted: float) -> dict[str, float]:
        return wanted if w.targets else {}

    ours = {what: found.of(OURS, what) for what in ("at_once", "long_step", "remote", "durable")}
    theirs = {what: found.of(PUBLISHED, what) for what in ("at_once", "remote", "durable")}
    ratio("stall, published over deepvm", theirs["at_once"], ours["at_once"], **target(at_least=8))
    remote_target = {} if w.remote_times is None else {"at_least": w.remote_times}
    ratio("until in remote memory, published over deepvm", theirs["remote"], ours["remote"], **remote_target)
    if w.targets:
        at_iperf3 = [size / rate for rate in found.iperf3]
        ratio("until in remote memory, published over the bytes at iperf3's rate", theirs["remote"], at_iperf3)
    ratio("until durable, published over deepvm", theirs["durable"], ours["durable"], **target(at_least=6))
    memcpy = found.of(LIMITS, "memcpy")
    ratio("stall when the optimizer steps at once, over one memcpy", ours["at_once"], memcpy, **target(below=1.3))
    ratio("stall after a long step, over one memcpy", ours["long_step"], memcpy, **target(below=0.15))
    ratio("one look at every tensor's address and version, over one memcpy", found.of(LIMITS, "look"), memcpy)
    ratio("one copy of every tensor on all cores and nothing else, over one memcpy", found.of(LIMITS, "copies"), memcpy)
    if w.name != "lora":  # where nothing is sent there is no rate
        rates = [size / s for s in ours["remote"]]
        plain = found.of(LIMITS, "transfer_rate")
        ratio("rate into remote memory, over iperf3 -l 1M", rates, found.iperf3, **target(at_least=0.8))
        ratio("the same of two plain processes that send, receive and hash, over iperf3 -l 1M", plain, found.iperf3)
        ratio("rate into remote memory, over those two plain processes", rates, plain)
    sizes = [size] * len(found.of(OURS, "trainer_bytes"))
    ratio("extra memory of the trainer, over the state", found.of(OURS, "trainer_bytes"), sizes, **target(below=1.05))
    ratio("memory of the node, over the state", found.of(OURS, "node_bytes"), sizes, note="2 buffers")
    if w.name == "lora":
        ratio("bytes sent, over the state", found.of(OURS, "bytes_sent"), sizes)
    return told


def tables(found: Measured) -> list[Table]:
    title = f"{found.workload.title}, {found.size_bytes / 1e6:,.0f} MB"
    return [_limits(found, title), _contest(found, title), *_switch_table(found, title)]


def _limits(found: Measured, title: str) -> Table:
    rows = [
        [what, _milliseconds(found.of(LIMITS, key)), f"{found.size_bytes / _median(found.of(LIMITS, key)) / GIB:.2f}"]
        for what, key in (
            ("one memcpy into warm memory", "memcpy"),
            ("write and fsync a new file", "disk_new"),
            ("write over a file and fsync", "disk_over"),
        )
        if found.of(LIMITS, key)
    ]
    rows.append(["iperf3 -l 1M, one stream", "", f"{_median(found.iperf3) / GIB:.2f}"])
    plain = found.of(LIMITS, "transfer_rate")
    if plain:
        rows.append(["two plain processes send, receive and hash", "", f"{_median(plain) / GIB:.2f}"])
    return Table(title=f"{title}: limits", columns=("", "ms (quartiles)", "GiB/s"), rows=rows)


COLUMNS = {
    "at_once": "stall, step at once",
    "long_step": "stall, long step",
    "remote": "in remote memory",
    "durable": "durable",
}


def _contest(found: Measured, title: str) -> Table:
    rows = []
    for name in (OURS, PUBLISHED, *LOCAL, *FOREIGN):
        if not found.samples[name]:
            continue
        cells = []
        for what in COLUMNS:
            text = _milliseconds(found.of(name, what))
            cells.append(f"**{text}**" if name != OURS and _faster(found, name, what) else text)
        rows.append([name, *cells, _milliseconds([t["at_once"] for t in found.first[name]])])
    heads = ("ms: median (quartiles); bold: faster than deepvm", *COLUMNS.values(), "stall of the first save")
    return Table(title=title, columns=heads, rows=rows)


def _switch_table(found: Measured, title: str) -> list[Table]:
    if not found.workload.switches or not found.samples[PUBLISHED]:
        return []
    base = {what: _median(found.of(PUBLISHED, what)) for what in ("at_once", "remote", "durable")}
    rows = []
    for name in switch_settings(found.workload):
        cells = []
        for what, was in base.items():
            values = found.of(name, what)
            cells.append(f"{_milliseconds(values)}, {was / _median(values):.1f}×")
        rows.append([name, *cells])
    columns = ("ms: median (quartiles), times faster than published", "stall", "in remote memory", "durable")
    return [Table(title=f"{title}: what each optimization brings to the published scheme", columns=columns, rows=rows)]


def _faster(found: Measured, name: str, what: str) -> bool:
    theirs, ours = found.of(name, what), found.of(OURS, what)
    return bool(theirs and ours) and _median(theirs) < _median(ours)


def method(rounds: int) -> list[str]:
    return [
        f"{rounds} saves of each contestant are counted. Ratios are of figures of the same round, then their median "
        "and quartiles.",
        "Stall, step at once: from the call until the optimizer may change the state. Long step: how long training "
        "waits in all when it comes to its next update after the save is over.",
        "deepvm's remote and durable are those of the save with the long step, nothing else running, as for the "
        "others; its bytes are verified at the node by checksums before they count as there.",
        *(f"{name}: {remark}." for name, remark in REMARKS.items()),
    ]


def findings(found: Measured) -> list[str]:
    notes = []
    title = found.workload.title
    for what, column in COLUMNS.items():
        faster = [n for n in (*LOCAL, *FOREIGN) if _faster(found, n, what)]
        if faster:
            best = min(faster, key=lambda n: _median(found.of(n, what)))
            notes.append(
                f"{title}, {column}: faster than deepvm ({_milliseconds(found.of(OURS, what))} ms) "
                f"{'is' if len(faster) == 1 else 'are'} {', '.join(faster)}; "
                f"the fastest, {best}, takes {_milliseconds(found.of(best, what))} ms."
            )
    busy = found.of(OURS, "remote_at_once")
    if busy:
        notes.append(f"{title}: with the update running at the same time, deepvm's bytes are in remote memory after "
                     f"{_milliseconds(busy)} ms.")  # fmt: skip
    notes += [f"{title}: {name} was skipped: {reason}." for name, reason in found.skipped.items()]
    return notes


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _milliseconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    values = [s * 1000 for s in seconds]
    if len(values) == 1:
        return _number(values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{_number(median)} ({_number(low)} to {_number(high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
