"""Fit the built-in hazards: ``python -m benchmarks.market.fit_builtin TRACES`` writes ``market/data/hazards.json``.

Only figures are written, never traces. Zones are grouped by accelerator and by how often a gang was up. A class with
traces of several machines is fitted to those; one of single machines takes the sizes of drops from all others.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from deepvm.errors import DeepvmError
from deepvm.market import builtin
from deepvm.market.hazard.alternating import AlternatingSpells
from deepvm.market.hazard.hidden import HiddenBulk
from deepvm.market.hazard.observed import Observed
from deepvm.market.trace import Trace, TraceKind, load_traces

TICK_S = 600.0
TARGET = Path(builtin.__file__).parent / "data" / "hazards.json"
Zone = tuple[str, Trace, Observed]  # set, trace, what was observed of it


def observed(trace: Trace) -> Observed:
    """The trace on ticks of ``TICK_S``: each new tick is what was last seen at its start."""
    ticks = int(len(trace.up) * trace.gap_s / TICK_S)
    at = np.minimum((np.arange(ticks) * TICK_S / trace.gap_s).astype(int), len(trace.up) - 1)
    return Observed(zone=trace.zone, up=trace.up[at], tick_s=TICK_S, machines=trace.machines)


def gang(one: Observed) -> int:
    return max(1, one.machines // 2)


def tightness(zone: Zone) -> str:
    share = float(zone[2].gang(gang(zone[2])).mean())
    return "calm" if share >= 0.8 else "medium" if share >= 0.4 else "tight"


def fitted(accelerator: str, tight: str, zones: list[Zone], prior: HiddenBulk | None) -> dict[str, Any]:
    most = max(one.machines for _, _, one in zones)
    used = [zone for zone in zones if zone[2].machines == most]
    parts = [one for _, _, one in used]
    model = HiddenBulk.fit(parts, prior=prior, prior_events=0.5)
    count = gang(parts[0])
    pair = AlternatingSpells.fit(parts, [count]).spells(count)
    up = sum(float(one.gang(count).sum()) for one in parts) / sum(len(one.up) for one in parts)
    return {
        "accelerator": accelerator,
        "tightness": tight,
        "origin": ", ".join(sorted({name for name, _, _ in used})),
        "zones": len(used),
        "days": round(max(one.hours for one in parts) / 24, 2),
        "tick_s": TICK_S,
        "machines": count,
        "availability": round(up, 3),
        "up": {"weights": rounded(pair.up.weights), "means_h": rounded(pair.up.means_h)},
        "down": {"weights": rounded(pair.down.weights), "means_h": rounded(pair.down.means_h)},
        "change": [rounded(row) for row in model.change],
        "kernels": [
            {
                "drop": round(kernel.drop, 6),
                "rise": round(kernel.rise, 6),
                "drop_sizes": rounded(kernel.drop_sizes),
                "rise_sizes": rounded(kernel.rise_sizes),
            }
            for kernel in model.kernels
        ],
    }


def rounded(values: tuple[float, ...]) -> list[float]:
    return [round(value, 7) for value in values]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.market.fit_builtin", description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--meaning", choices=("up", "preempted"), default="up")
    given = parser.parse_args(arguments)
    zones: list[Zone] = [
        (name.split("/")[-1], trace, observed(trace))
        for name, traces in load_traces(given.traces, meaning=given.meaning).items()
        for trace in traces
        if trace.kind is TraceKind.LAUNCH
    ]
    several = [one for _, _, one in zones if one.machines >= 8]
    sizes = HiddenBulk.fit(several) if several else None
    groups: dict[tuple[str, str], list[Zone]] = {}
    for zone in zones:
        accelerator = zone[1].accelerator or builtin.ANY
        groups.setdefault((accelerator, tightness(zone)), []).append(zone)
        if zone[2].machines >= 8:
            groups.setdefault((builtin.ANY, tightness(zone)), []).append(zone)
    order = sorted(groups, key=lambda key: (key[0], builtin.TIGHTNESS.index(key[1])))
    rows = [fitted(*key, groups[key], sizes) for key in order]
    document = {"format": builtin.FORMAT, "fitted": datetime.now(timezone.utc).date().isoformat()}
    lines = ",\n".join(json.dumps(row) for row in rows)
    TARGET.write_text(json.dumps(document)[:-1] + ', "classes": [\n' + lines + "\n]}\n", encoding="utf-8")
    for row in rows:
        print(f"{row['accelerator']:6} {row['tightness']:7} {row['zones']} zones, up {row['availability']:.0%}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DeepvmError as error:
        sys.exit(f"{error}")
