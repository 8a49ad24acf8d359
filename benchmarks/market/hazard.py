"""Hazard models on later data: ``python -m benchmarks.market.hazard TRACES [--share 0.6]`` prints two tables.

The first has the log-likelihood of the later part of every set, in nats per tick, by model. The second has the waste of
checkpoints on later spells: Young/Daly with the gang's rate against intervals by the age of the spell.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepvm.errors import DeepvmError
from deepvm.market.hazard.held_out import HALF_LIFE_H, held_out
from deepvm.market.hazard.observed import Observed, observe
from deepvm.market.trace import load_traces
from deepvm.simulate.by_age import age_waste

STALLS_S = (0.1, 1.0, 5.0, 30.0)


def gang_of(observed: tuple[Observed, ...]) -> int:
    """Half of a large number of machines, all of a small one."""
    most = observed[0].machines
    return most // 2 if most >= 8 else most


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.market.hazard", description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--meaning", choices=("up", "preempted"), default="up")
    parser.add_argument("--share", type=float, default=0.6, help="of each trace that is fitted")
    parser.add_argument("--half-life-h", type=float, default=HALF_LIFE_H, help="0: all data count the same")
    given = parser.parse_args(arguments)
    half_life_h = given.half_life_h or None
    sets = {name: observe(traces) for name, traces in load_traces(given.traces, meaning=given.meaning).items()}
    print("| set | zones | gang | ticks | spells | hidden | Poisson | hidden, counts | Poisson, counts |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, observed in sets.items():
        row = held_out(observed, gang_of(observed), share=given.share, half_life_h=half_life_h)
        gang = f"{row.spells:.5f} | {row.hidden:.5f} | {row.poisson:.5f}"
        counts = f"{row.hidden_counts:.4f} | {row.poisson_counts:.4f}"
        print(f"| {name} | {row.zones} | {row.machines} | {row.ticks} | {gang} | {counts} |", flush=True)
    print(f"\n| set | {' | '.join(f'stall {s:g} s' for s in STALLS_S)} |\n|---|{'---|' * len(STALLS_S)}")
    sums = {stall_s: [0.0, 0.0] for stall_s in STALLS_S}
    for name, observed in sets.items():
        cells = []
        for stall_s in STALLS_S:
            waste = age_waste(observed, gang_of(observed), stall_s, share=given.share, half_life_h=half_life_h)
            sums[stall_s][0] += waste.young_daly_h
            sums[stall_s][1] += waste.by_age_h
            cells.append(f"{waste.young_daly_h:.3f} h -> {waste.by_age_h:.3f} h ({-waste.saved:+.1%})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    cells = [f"{before:.3f} h -> {after:.3f} h ({after / before - 1:+.1%})" for before, after in sums.values()]
    print(f"| all | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DeepvmError as error:
        sys.exit(f"{error}")
