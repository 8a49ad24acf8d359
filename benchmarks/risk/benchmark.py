"""Plans under a spot market against the fastest plan: random markets to plan on and later days to judge by."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks import Measurement, Options, Result, Table, measurement, seconds
from benchmarks.risk.markets import RandomMarket, random_market
from deepvm.catalog import library
from deepvm.plan import Request, objectives, plan
from deepvm.plan.result import Plan
from deepvm.plan.risk.replays import Judged, Replays
from deepvm.plan.risk.screen import Screen, picks
from deepvm.plan.risk.search import FEW_STARTS, trials_of
from deepvm.plan.risk.spot import Spot
from deepvm.plan.risk.trial import Trial
from deepvm.plan.search.instances import analyse_instances

SEED = 19
MARKETS = 60
BUDGET_USD = 45.0
WAITING_USD = 20.0  # an hour
WORK_EFLOPS_H = 24 * 8 * 4758.0  # a day of eight machines that scale perfectly
CHECKPOINT_BYTES = 6 * 10**9
STEP_S = 20.0  # on a T4: a job that scales: 24 machines train as fast as 18
DEFAULT_SAVE_S = 10.0  # of deepvm run
COMMAND = (
    "plan", "--budget", "20", "--work", "240h@g4dn.xlarge", "--objective", "cost", "--deadline", "36h", "--json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Values, cost + $20/h × time, on the later days; and what was predicted of the plan chosen."""

    fastest: float
    fit: float  # another number of machines, saves and tier, in one zone, waiting
    shrink: float
    move: float
    every: float
    predicted_h: float
    found_h: float
    predicted_usd: float
    found_usd: float
    moves: bool


def run(options: Options) -> Result:
    count = 8 if options.quick else options.rounds or MARKETS
    compared = [_compare(random_market(SEED * 1000 + i)) for i in range(count)]
    gain = np.array([1 - one.every / one.fastest for one in compared])
    moving = [one for one in compared if one.moves]
    hours = np.array([abs(one.predicted_h / one.found_h - 1) for one in moving])
    usd = np.array([abs(one.predicted_usd / one.found_usd - 1) for one in moving])
    bias_h = abs(sum(one.predicted_h for one in moving) / sum(one.found_h for one in moving) - 1)
    bias_usd = abs(sum(one.predicted_usd for one in moving) / sum(one.found_usd for one in moving) - 1)
    return Result(
        title="Plans under a spot market",
        about=(
            f"{count} random markets of H100 machines, 4 zones in 2 regions: 14 days to plan with, the 28 days after "
            f"them to judge by. Value: cost + ${WAITING_USD:g}/h × time. The fastest plan is `--objective throughput "
            "--market none` for the same budget, run as `deepvm run` does by default: it stays in its zone and waits."
        ),
        seed=SEED,
        measurements=[
            measurement("value below that of the fastest plan, by market", gain.tolist(), unit="share", at_least=0.25),
            measurement("markets where it is worse", [float((gain < 0).mean())], unit="share", below=0.0501),
            measurement(
                "predicted mean time of moving plans, all markets together", [bias_h], unit="share", below=0.05
            ),
            measurement("predicted mean cost of moving plans, all together", [bias_usd], unit="share", below=0.07),
            measurement("the same by market: time", hours.tolist(), unit="share"),
            measurement("the same by market: cost", usd.tolist(), unit="share"),
            *_speed(options),
        ],
        tables=[_shares(compared)],
        notes=[
            f"{len(moving)} of the {count} plans may move.",
            "A market's later days differ from its first ones by chance: errors by market have that in them.",
        ],
        samples={"markets": [asdict(one) for one in compared]},
    )


def _compare(market: RandomMarket) -> Compared:
    common = {
        "budget_usd": BUDGET_USD, "work_eflops_h": WORK_EFLOPS_H, "checkpoint_bytes": CHECKPOINT_BYTES,
        "step_s": STEP_S, "top": 1,
    }  # fmt: skip
    priced = Request(**common, objective="cost", usd_per_hour_of_waiting=WAITING_USD)  # type: ignore[arg-type]
    found = plan(market.catalog, priced, traces=market.traces)
    assert found.found is not None
    judged = found.found.judged

    def best(keep: Callable[[Trial], bool]) -> Judged:
        return market.judge(next(one.trial for one in judged if one.trial.market is not None and keep(one.trial)))

    chosen = found.found.best[0]
    later = market.judge(chosen.trial)
    return Compared(
        fastest=_fastest(market, common).usd,
        fit=best(lambda trial: _stays(trial) and _waits(trial)).usd,
        shrink=best(_stays).usd,
        move=best(_waits).usd,
        every=later.usd,
        predicted_h=chosen.risk.mean_h,
        found_h=later.risk.mean_h,
        predicted_usd=chosen.risk.mean_usd,
        found_usd=later.risk.mean_usd,
        moves=not _stays(chosen.trial),
    )


def _stays(trial: Trial) -> bool:
    return len(trial.choice.columns) == 1


def _waits(trial: Trial) -> bool:
    return trial.choice.least is None


def _fastest(market: RandomMarket, common: dict[str, object]) -> Judged:
    """Replay the plan of --objective throughput in its own zone, saving every 10 s."""
    still: Plan = plan(market.catalog, Request(**common, market="none"))  # type: ignore[arg-type]
    best = still.recommendations[0]
    priced = Request(**common, objective="cost", usd_per_hour_of_waiting=WAITING_USD)  # type: ignore[arg-type]
    board = analyse_instances(market.catalog, priced)
    space = objectives.build_space(board)
    screen = Screen(space=space, spot=Spot.of(board, market.traces))
    groups = list(screen.groups())
    place = market.catalog.places.index((best.worker.region, best.worker.zone))
    for number, rows in enumerate(groups):
        name = space.architectures[rows.architecture].name
        here = int(board.workers.place[rows.worker]) == place
        if name == best.architecture and here and not rows.shrink and len(rows.columns) == 1:
            pick = next(p for p in picks(screen, groups) if p.number == number)
            trial = next(trials_of(screen, groups, [replace(pick, nodes=best.nodes)]))
            trial.__dict__["interval_s"] = DEFAULT_SAVE_S
            return market.judge(trial)
    raise AssertionError("the fastest plan is not in the space of the market's plans")


def _shares(compared: Sequence[Compared]) -> Table:
    """What each freedom brings, in the median over the markets."""
    rows = []
    for name, field in (
        ("fit: machines, saves and tier; stays, waits", "fit"),
        ("fit, and shrink", "shrink"),
        ("fit, and move", "move"),
        ("fit, shrink and move: the plan", "every"),
    ):
        gains = np.array([1 - getattr(one, field) / one.fastest for one in compared])
        low, middle, high = np.percentile(gains, (25, 50, 75))
        rows.append([name, f"{middle:.1%}", f"{low:.1%} to {high:.1%}", f"{(gains < 0).mean():.1%}"])
    return Table(
        title="What brings it", columns=("freedom", "below the fastest plan", "quartiles", "worse in"), rows=rows
    )


def _speed(options: Options) -> list[Measurement]:
    runs = 3 if options.quick else 7
    catalog = library.load()
    request = Request(
        budget_usd=20.0, objective="cost", work_eflops_h=240 * 377.0, deadline_s=36 * 3600.0,
        architectures=("tiering", "single-anchor", "all-spot", "all-on-demand"),
    )  # fmt: skip
    board = analyse_instances(catalog, request)
    space = objectives.build_space(board)
    screen = Screen(space=space, spot=Spot.of(board, None))
    groups = list(screen.groups())
    trials = list(trials_of(screen, groups, picks(screen, groups)))
    many = (trials * (500 // len(trials) + 1))[:500]
    one = next(trial for trial in trials if trial.market is not None)
    return [
        measurement(
            f"500 candidates from {FEW_STARTS} starts each, CPU time", _cpu(lambda: _replays(screen, many), runs),
            below=5.0,
        ),
        measurement(
            "one plan's risk from 200 starts, CPU time", _cpu(lambda: Replays(screen.market, 200).judge(one), runs),
            below=0.05,
        ),
        measurement("a plan, in process, CPU time", _cpu(lambda: plan(catalog, request), runs)),
        measurement(f"deepvm {' '.join(COMMAND)}, wall", seconds(_command, runs=runs), below=2.0),
    ]  # fmt: skip


def _replays(screen: Screen, trials: Sequence[Trial]) -> None:
    Replays(screen.market, FEW_STARTS).all(trials)


def _cpu(work: Callable[[], object], runs: int) -> list[float]:
    work()
    taken = []
    for _ in range(runs):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return taken


def _command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepvm", *COMMAND], capture_output=True, text=True, timeout=120, check=True
    )
    json.loads(done.stdout)
