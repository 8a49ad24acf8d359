"""Hazard models on later data: the log-likelihood of every set by model, and the waste of checkpoints by interval.

The waste compares Young/Daly with the gang's rate against intervals by the age of the spell, on later spells.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import Table
from deepvm.market import load_traces
from deepvm.market.hazard.held_out import HALF_LIFE_H, HeldOut, held_out
from deepvm.market.hazard.observed import Observed, observe
from deepvm.market.trace import Meaning
from deepvm.simulate.by_age import AgeWaste, age_waste

STALLS_S = (0.1, 1.0, 5.0, 30.0)


def gang_of(observed: tuple[Observed, ...]) -> int:
    """Half of a large number of machines, all of a small one."""
    most = observed[0].machines
    return most // 2 if most >= 8 else most


@dataclass(frozen=True, kw_only=True)
class SetOfTraces:
    """What the hazard models are worth on the later part of one set."""

    name: str
    likelihood: HeldOut
    waste: tuple[AgeWaste, ...]  # by STALLS_S


def sets(folder: Path, meaning: Meaning, *, share: float, half_life_h: float | None = HALF_LIFE_H) -> list[SetOfTraces]:
    found = []
    for name, traces in load_traces(folder, meaning=meaning).items():
        for observed in _alike(observe(traces)):
            gang = gang_of(observed)
            found.append(
                SetOfTraces(
                    name=name,
                    likelihood=held_out(observed, gang, share=share, half_life_h=half_life_h),
                    waste=tuple(
                        age_waste(observed, gang, stall_s, share=share, half_life_h=half_life_h) for stall_s in STALLS_S
                    ),
                )
            )
    return found


def _alike(observed: tuple[Observed, ...]) -> list[tuple[Observed, ...]]:
    """Group zones by their length of tick: models are fitted to one."""
    ticks = dict.fromkeys(one.tick_s for one in observed)
    return [tuple(one for one in observed if one.tick_s == tick_s) for tick_s in ticks]


def likelihoods(found: list[SetOfTraces]) -> Table:
    """Nats per tick of the later part, by model."""
    rows = []
    for one in found:
        row = one.likelihood
        figures = [f"{value:.5f}" for value in (row.spells, row.hidden, row.poisson)]
        figures += [f"{value:.4f}" for value in (row.hidden_counts, row.poisson_counts)]
        rows.append([one.name, str(row.zones), str(row.machines), str(row.ticks), *figures])
    heads = ("set", "zones", "gang", "ticks", "spells", "hidden", "Poisson", "hidden, counts", "Poisson, counts")
    return Table(title="Log-likelihood of later ticks, in nats per tick", columns=heads, rows=rows)


def wastes(found: list[SetOfTraces]) -> Table:
    """Waste of later spells: one interval for all ages, and intervals by age."""
    rows = [
        [one.name, *(f"{w.young_daly_h:.3f} h -> {w.by_age_h:.3f} h ({-w.saved:+.1%})" for w in one.waste)]
        for one in found
    ]
    heads = ("set", *(f"stall {stall_s:g} s" for stall_s in STALLS_S))
    return Table(title="Waste of checkpoints on later spells: Young/Daly -> by age", columns=heads, rows=rows)


def saved(found: list[SetOfTraces], stall_s: float) -> float:
    """Return the share of the waste that intervals by age save, over all sets."""
    at = STALLS_S.index(stall_s)
    fixed, by_age = (sum(getattr(one.waste[at], name) for one in found) for name in ("young_daly_h", "by_age_h"))
    return 1 - by_age / fixed if fixed else 0.0
