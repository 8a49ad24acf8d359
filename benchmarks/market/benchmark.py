"""What the simulator and its plans are worth: speed, exactness, and, with ``--traces``, plans on recorded markets.

Each trace is split: the part before ``--share`` is history, the starts lie after it. Without ``--traces``, the markets
are drawn from built-in figures; such results say nothing of plans on real markets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks import Measurement, Options, Result, Table, measurement
from benchmarks.market import exact, hazard, plans, speed
from benchmarks.market.plans import COLUMNS, Case
from deepvm.errors import UsageError
from deepvm.market.trace import check_meaning
from deepvm.simulate import GangJob

SEED = 1
STARTS = 40


def run(options: Options) -> Result:
    rounds = 3 if options.quick else options.rounds or 5
    rows: list[Measurement] = [*speed.rows(rounds), *exact.rows()]
    tables: list[Table] = []
    found, notes = _cases(options)
    rows += [*_plans(found), *_promises([*found, *_smaller(options)])]
    tables.append(Table(title="Plans", columns=COLUMNS, rows=[case.cells() for case in found]))
    if options.traces is not None:
        sets = hazard.sets(options.traces, check_meaning(options.meaning), share=options.share)
        rows += _hazards(sets)
        tables += [hazard.likelihoods(sets), hazard.wastes(sets)]
    return Result(
        title="Spot markets: simulator, plans and hazard models",
        about=(
            f"Starts in the part after {options.share:.0%} of each trace; what came before is history. 24 h of work, "
            "6 GB of checkpoint. Regret is cost over the oracle's lower bound."
        ),
        seed=SEED,
        measurements=rows,
        tables=tables,
        notes=notes,
    )


def _cases(options: Options) -> tuple[list[Case], list[str]]:
    starts = 20 if options.quick else STARTS
    found: list[Case] = []
    notes: list[str] = []
    if options.traces is not None:
        cases = plans.cases(
            options.traces, check_meaning(options.meaning), share=options.share, starts=starts, seed=SEED
        )
        for case in cases:
            notes.append(f"left out: {case}") if isinstance(case, str) else found.append(case)
    else:
        job = GangJob(work_h=plans.WORK_H, machines=8, checkpoint_bytes=6 * 10**9)
        drawn = plans.of_market(speed.market(30, 9), job, share=options.share, starts=starts, seed=SEED)
        found = [case for case in drawn if isinstance(case, Case)]
        notes.append("markets drawn from built-in figures: give --traces for recorded ones")
    if not found:
        raise UsageError("no market shows the cases of this benchmark: " + "; ".join(notes[:3]))
    return found, notes


def _smaller(options: Options) -> list[Case]:
    if options.traces is None:
        return []
    meaning = check_meaning(options.meaning)
    starts = 20 if options.quick else STARTS
    return list(plans.smaller_markets(options.traces, meaning, share=options.share, starts=starts, seed=SEED))


def _plans(found: Sequence[Case]) -> list[Measurement]:
    wide = [case for case in found if case.many_zones]
    rows = []
    for slack in plans.SLACKS:
        regrets = [100 * case.regret for case in wide if case.slack == slack]
        if regrets:
            what = f"regret of planned, markets of {plans.MANY_ZONES} zones and more, deadline {slack:g} of the work"
            rows.append(measurement(what, regrets, unit="%", below=12.0, note=f"worst {max(regrets):.1f} %"))
    for slack, below in ((1.1, 1.0 + 1e-9), (1.25, 1e-9)):
        late = [100 * case.missed for case in found if case.slack == slack]
        what = f"missed deadlines at {slack:g} of the work, worst of all markets"
        rows.append(measurement(what, [max(late)], unit="%", below=below))
    return rows


def _promises(cases: Sequence[Case]) -> list[Measurement]:
    """What ``planned`` promised, over all markets with enough history."""
    promised = [case for case in cases if case.result.coverage is not None]
    if not promised:
        return []
    single = [100 * (case.result.coverage or 0.0) for case in promised]
    coverage = float(np.mean(single))
    note = f"{len(promised)} cases with enough history, from {min(single):.0f} % to {max(single):.0f} %"
    most = [case.promised_over_real for case in promised]
    return [
        measurement(
            "starts within a promise of 95 %, mean over markets, at least", [coverage], unit="%", at_least=90.0,
            note=note,
        ),
        measurement("the same, at most", [coverage], unit="%", below=99.0),
        measurement("promised most over real p95, cost", [cost for cost, _ in most], unit="x", below=1.5),
        measurement("promised most over real p95, time", [hours for _, hours in most], unit="x", below=1.5),
        measurement(
            "promised mean of cost against the real one", [100 * plans.pooled_error(promised, "cost_usd")], unit="%",
            below=7.0,
        ),
        measurement(
            "promised mean of time against the real one", [100 * plans.pooled_error(promised, "hours")], unit="%",
            below=5.0,
        ),
    ]  # fmt: skip


def _hazards(sets: Sequence[hazard.SetOfTraces]) -> list[Measurement]:
    better = [min(one.likelihood.spells, one.likelihood.hidden) > one.likelihood.poisson for one in sets]
    rows = [
        measurement(
            "sets whose later ticks hyperexponential and hidden both explain better than Poisson",
            [100 * float(np.mean(better))], unit="%", at_least=100.0, note=f"{sum(better)} of {len(better)}",
        )
    ]  # fmt: skip
    for stall_s in hazard.STALLS_S:
        what = f"waste saved by intervals by age on later spells, stall {stall_s:g} s"
        rows.append(measurement(what, [100 * hazard.saved(list(sets), stall_s)], unit="%", at_least=5.0))
    return rows
