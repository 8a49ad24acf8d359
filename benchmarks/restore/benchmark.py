"""Restore: how long until a lost worker computes again, against the ways that people know."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Mapping, Sequence

from benchmarks import Measurement, Options, Result, measurement
from benchmarks.common.scratch import scratch_folder

SEED = 7
ROUNDS, QUICK_ROUNDS = 15, 3
Samples = Mapping[str, Sequence[float]]


def run(options: Options) -> Result:
    from benchmarks.restore import flows, local, overlap, processes, templates

    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    notes = [
        "Ratios are of the two figures of one round, in an order drawn anew each round; the first is not counted.",
        "Every restore begins with the model built and an optimizer that never stepped. The first loss is that of one "
        "sentence of 33 tokens, or of a whole context, 1,025; every restored model gave the saved one's, bit for bit.",
        "Before each restore, free memory that a hypervisor has taken back is touched and let go again; during each "
        "start, some is let go of every 0.4 s (limits.wake_memory, limits.AwakeMemory): a rented machine has its "
        "memory, and a test machine gets it at 0.4 GB/s, for as long as it is used.",
        "iperf3's rate is the best of three runs in each round: single ones reach a third of it on some machines.",
        "safetensors + assign maps the file: it verifies nothing, and its first step copies every page that it writes.",
    ]
    with scratch_folder() as scratch:
        here, size_bytes = local.measure(scratch, rounds, SEED)
        first_loss = processes.measure(local.files_in(scratch), rounds, SEED)
    entries = templates.measure(rounds)
    overlapped = overlap.measure(max(3, rounds // 2))  # each takes half a minute
    found = [
        *_here(here, size_bytes),
        *_compared("worker entry from a template, over a fresh interpreter with import torch", entries,
                   templates.FORKED, templates.FRESH, 0.02),
        *_compared("warm file to first loss from a template, over torch.load in a fresh process", first_loss,
                   processes.FORKED, processes.FRESH, 0.30),
    ]  # fmt: skip
    for network in (overlap.LOOPBACK, *overlap.BIT_PER_S):
        totals = {name: values for name, values in overlapped.items() if name.startswith(f"{network}, ")}
        if totals:
            found += _overlapped(network, totals, size_bytes)
    try:
        with scratch_folder() as scratch:
            limited = flows.measure(scratch, max(3, rounds // 3))
        found += _compared("limited connections: four, lazy, over one, eager, to the first loss", limited,
                           "4 connections, lazy", "1 connection, eager", 0.28)  # fmt: skip
        what = "first loss with the optimizer deferred, over a full eager restore (four limited connections)"
        found.append(_ratio(what, limited, "4 connections, lazy", "4 connections, eager", 0.45))
    except (PermissionError, FileNotFoundError, subprocess.CalledProcessError) as error:
        limited = {}
        notes.append(f"Limited connections are skipped: namespaces and tc need root ({error}).")
    return Result(
        title="Restore",
        about="Restores of GPT-2 small with AdamW (1.49 GB, of which 1 GB are the optimizer's).",
        seed=SEED,
        measurements=found,
        notes=notes,
        samples={"here": here, "entries": entries, "first loss": first_loss, "overlap": overlapped, "limited": limited},
    )


def _here(times: Samples, size_bytes: int) -> list[Measurement]:
    def ratio(what: str, mine: str, theirs: str, below: float | None = None) -> Measurement:
        return _ratio(what, times, mine, theirs, below)

    steps = [statistics.median(times["step after"]) / statistics.median(times["step before"])]
    peaks = {kind: [b / size_bytes for b in times[f"{kind}: peak extra bytes"]] for kind in ("node", "node, lazy")}
    return [
        ratio("warm file to first loss, lazy, over torch.load + load_state_dict", "file, lazy: first loss",
              "torch.load: first loss", 0.50),
        ratio("warm file to first loss, lazy, over safetensors + assign", "file, lazy: first loss",
              "safetensors + assign: first loss", 1.05),
        ratio("the same, with a first forward of a whole context instead of a sentence",
              "file, lazy, a whole context: first loss", "safetensors + assign, a whole context: first loss", 1.05),
        ratio("safetensors + assign with checksums on all cores beside it, told when both are done, over it without",
              "safetensors + assign, verified: first loss", "safetensors + assign: first loss"),
        ratio("verifying the parameters in a mapped file and nothing else, over safetensors + assign", "verifying",
              "safetensors + assign: first loss"),
        ratio("warm file to first loss, eager, over torch.load + load_state_dict", "file: first loss",
              "torch.load: first loss"),
        ratio("first loss with the optimizer deferred, over a full eager restore", "node, lazy: first loss",
              "node: first loss", 0.45),
        _least_deferred(times, size_bytes),
        ratio("remote restore to ready, eager, over the bytes at iperf3's rate", "node: ready", "iperf3", 1.35),
        ratio("remote restore to the first loss, lazy, over the same", "node, lazy: first loss", "iperf3", 1.35),
        ratio("a plain process receives the bytes into fresh memory and hashes them, over the same", "plain transfer",
              "iperf3"),
        measurement("step after a restore over step before", steps, unit="times", below=1.02, note="medians"),
        measurement("peak extra memory, in states", peaks["node"], unit="times", below=1.10, note="eager"),
        measurement("peak extra memory, in states", peaks["node, lazy"], unit="times", below=1.10, note="lazy"),
        *(measurement(name, values) for name, values in times.items() if "bytes" not in name),
    ]  # fmt: skip


def _least_deferred(times: Samples, size_bytes: int) -> Measurement:
    """What deferring the optimizer can bring where bytes and a forward take the same cores."""
    share = times["node: bytes of the parameters"][0] / size_bytes
    pairs = zip(times["node: ready"], times["node: first loss"], strict=True)
    least = [1 - (1 - share) * ready / first_loss for ready, first_loss in pairs]
    return measurement("the parameters at the eager restore's own rate and a forward, over it", least, unit="times")


def _overlapped(network: str, totals: Samples, size_bytes: int) -> list[Measurement]:
    from benchmarks.restore.overlap import APART, BIT_PER_S, ON_DEMAND, OVERLAPPED

    def ratio(kind: str) -> Measurement:
        what = f"process start to next finished step, {kind}, over one stage after another ({network})"
        below = 0.65 if network in BIT_PER_S else None  # without a network there is next to nothing to hide
        return _ratio(what, totals, f"{network}, {kind}", f"{network}, {APART}", below)

    bytes_s = 8 * size_bytes / BIT_PER_S[network] if network in BIT_PER_S else 0.0
    apart = [totals[f"{network}, {APART}{stage}"] for stage in ("", ": restore", ": first step")]
    least = [(max(bytes_s, total - restore - step) + step) / total for total, restore, step in zip(*apart, strict=True)]
    what = f"{network}: the longer of the bytes at the link's rate and of import and model, and a step, over the same"
    return [
        ratio(OVERLAPPED),
        ratio(ON_DEMAND),
        measurement(what, least, unit="times", note="the least for an eager restore"),
        *(measurement(name, values) for name, values in totals.items()),
    ]


def _compared(what: str, times: Samples, mine: str, theirs: str, below: float) -> list[Measurement]:
    return [
        _ratio(what, times, mine, theirs, below),
        *(measurement(name, values) for name, values in times.items()),
    ]


def _ratio(what: str, times: Samples, mine: str, theirs: str, below: float | None) -> Measurement:
    values = [a / b for a, b in zip(times[mine], times[theirs], strict=True)]
    return measurement(what, values, unit="times", below=below)
