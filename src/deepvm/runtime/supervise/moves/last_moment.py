"""A deadline and what is left of the work -> a gang on on-demand machines in time, and back on spot ones.

The moments are those of the policy object that the simulator replays, ``policy.fallback``. Its figures are what the run
has measured: steps, saves, starts, restores. All hours are on the market's clock, which may be faster than the run's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from deepvm.policy import SavePolicy
from deepvm.policy.fallback import Fallback, Rest, SafetyNet, margin_h
from deepvm.policy.policy_text import parse_policy
from deepvm.runtime.backends.local.played_market import PlayedMarket
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.ledger.report import Report
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.gang import Gang, Moved
from deepvm.runtime.supervise.moves.pace import Pace
from deepvm.simulate.saves import PolicySaves
from deepvm.simulate.strategies import Rates
from deepvm.units import USD_TOLERANCE, format_seconds, format_usd

MOST_STEPS = 20_000  # that a save policy is asked about; saves are as dense in the others
START_S = 20.0  # of processes on this machine, until a start was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """What a run has to keep, as its plan and its user say it. Hours are on the market's clock."""

    hours: float
    work_h: float  # by the plan
    steps: int | None  # of the whole training; None: the plan's hours are all that is known
    still_h: float  # by the plan: from the request of a machine to training, with the restore


@dataclass(frozen=True, slots=True)
class _Saving:
    """What the saves of some steps cost, in the run's seconds."""

    needed_s: Callable[[float], float]  # for this much training
    worst_loss_s: float


class LastMoment:
    """Decides when a gang changes to on-demand machines, and when it returns."""

    def __init__(
        self,
        deadline: Deadline,
        fallback: Fallback,
        *,
        saves: SavePolicy,
        elapsed_s: Callable[[], float],
        speed: float = 1.0,
        offered: Callable[[Cluster], Cluster | None],
    ) -> None:
        """``elapsed_s`` returns the run's seconds since its start; the market's clock is ``speed`` times as fast.
        ``offered`` returns the cluster where spot machines are up for it now."""
        self.pace = Pace()
        self._deadline, self._fallback, self._saves = deadline, fallback, saves
        self._elapsed_s, self._scale, self._offered = elapsed_s, speed / 3600, offered
        self._spot: Mapping[str, Machine] = {}  # what the gang had on spot, while it is on demand
        self._asked: tuple[tuple[float, ...], _Saving] | None = None  # the last figures of the saves
        self._warned = False
        self._warnings: list[str] = []

    @property
    def hired(self) -> frozenset[str]:
        """Return the machines that are on demand instead of on spot."""
        return frozenset(self._spot)

    def decide(self, cluster: Cluster, *, whole: bool, trained: int, safe: int) -> Moved | None:
        """Return the cluster on other machines, if it is time for that.

        ``whole``: all machines that train are up. ``trained`` and ``safe`` are the last step and the last one that is
        saved."""
        if self._spot:
            return self._return(cluster, trained) if whole and self._fallback.returns else None
        return None if whole or not cluster.gang else self._hire(cluster, safe)

    def _hire(self, cluster: Cluster, safe: int) -> Moved | None:
        rest, now_h = self._rest(safe), self._elapsed_s() * self._scale
        is_up = self._offered(cluster) is not None
        at_h = float((self._fallback.must_h if is_up else self._fallback.from_h)(rest)[0])
        if not math.isfinite(at_h):
            self._warn(
                f"the deadline of {_time(self._deadline.hours)} cannot be kept: the work alone takes "
                f"{_time(rest.work_h)} ({self._measured()}), so the gang stays on spot machines"
            )
        if not now_h >= at_h:
            return None
        if any(machine.on_demand_usd_per_hour is None for machine in cluster.gang):
            self._warn("no on-demand price is known for the gang, so it stays on spot machines")
            return None
        spot = {machine.name: machine for machine in cluster.gang}
        hired = tuple(_on_demand(machine) if machine.name in spot else machine for machine in cluster.machines)
        target = replace(cluster, machines=hired)
        budget_usd = cluster.plan.get("request", {}).get("budget_usd")
        if budget_usd is not None and target.hourly_usd > budget_usd + USD_TOLERANCE:
            self._warn(
                f"on-demand machines would cost {format_usd(target.hourly_usd)}/h, more than the budget of "
                f"{format_usd(budget_usd)}/h: the gang stays on spot machines, and may miss its deadline"
            )
            return None
        self.pace.end_group()
        self._spot = spot
        first = next(machine for machine in hired if machine.name in spot)
        why = "spot machines are up, but one more loss would break it" if is_up else "no spot machines are up for it"
        return target, (
            f"the gang of {len(self._spot)} goes on demand in {_place(first)}, {_time(now_h)} after the start: this "
            f"keeps the deadline of {_time(self._deadline.hours)}; {why}",
            f"the rest takes {_time(float(rest.needed_h[0]))}, and {_time(rest.margin_h)} are kept for starts, "
            f"restores and one more loss; {self._measured()}",
            f"the cluster costs {format_usd(target.hourly_usd)}/h instead of {format_usd(cluster.hourly_usd)}/h",
        )

    def _return(self, cluster: Cluster, trained: int) -> Moved | None:
        """Return to spot machines once they are up, if time is left for a try and the on-demand ones were worth it."""
        machines = tuple(self._spot.get(machine.name, machine) for machine in cluster.machines)
        target = self._offered(replace(cluster, machines=machines))
        if target is None:
            return None
        rest, now_h = self._rest(trained), self._elapsed_s() * self._scale
        worth_it = self.pace.trained_s is not None and self.pace.trained_s >= (self.pace.start_s or START_S)
        if not worth_it or not float(self._fallback.stay_h(rest)[0]) > now_h + rest.margin_h:
            return None
        first, self._spot = target.gang[0], {}
        return target, (
            f"the gang of {len(target.gang)} returns to spot machines in {_place(first)}, {_time(now_h)} after the "
            "start: they are up again, and time is left for a try",
            f"the cluster costs {format_usd(target.hourly_usd)}/h instead of {format_usd(cluster.hourly_usd)}/h",
        )

    def take_warnings(self) -> list[str]:
        """Return what the user should know, once."""
        taken, self._warnings = self._warnings, []
        return taken

    def _warn(self, text: str) -> None:
        """Warn once: the reasons rarely change."""
        if not self._warned:
            self._warned = True
            self._warnings.append(text)

    # --- what is left -----------------------------------------------------------------------------------------------

    def _rest(self, step: int) -> Rest:
        """Return what is left of the work after this step, with the figures of the run as far as it has them."""
        pace, deadline = self.pace, self._deadline
        work_h, step_h = deadline.work_h, None if pace.step_s is None else pace.step_s * self._scale
        if deadline.steps is None:
            done_h = min(work_h, step * (step_h or 0.0))
        else:
            work_h = work_h if step_h is None else deadline.steps * step_h
            done_h = work_h * min(1.0, step / deadline.steps)
        saving = self._saving(work_h / self._scale)
        still_h = max(deadline.still_h, START_S * self._scale)
        if pace.start_s is not None:
            still_h = (pace.start_s + pace.restore_s) * self._scale
        return Rest(
            work_h=work_h,
            done_h=np.array([done_h]),
            deadline_h=deadline.hours,
            speed=1.0,  # as many on-demand machines of the same type
            needed_h=np.array([saving.needed_s((work_h - done_h) / self._scale) * self._scale]),
            margin_h=margin_h(start_h=still_h, restore_h=0.0, worst_loss_h=saving.worst_loss_s * self._scale),
        )

    def _saving(self, work_s: float) -> _Saving:
        """Ask the save policy about the steps of this much training; their figures rarely change."""
        pace = self.pace
        if pace.step_s is None or not pace.step_s > 0 or not work_s > 0:
            return _Saving(lambda rest_s: rest_s, 0.0)
        figures = (work_s, pace.step_s, pace.stall_s, pace.save_s)
        if self._asked is None or self._asked[0] != figures:
            span_h = min(work_s, MOST_STEPS * pace.step_s) / 3600
            asked = PolicySaves(
                policy=self._saves, work_h=span_h, step_h=pace.step_s / 3600, stall_h=pace.stall_s / 3600,
                remote_h=max(0.0, pace.save_s - pace.stall_s) / 3600,
            )  # fmt: skip
            self._asked = figures, _Saving(lambda rest_s: _needed_s(asked, rest_s, span_h), asked.worst_loss_h * 3600)
        return self._asked[1]

    def _measured(self) -> str:
        pace = self.pace
        if pace.step_s is None:
            return "nothing is measured yet, so these are the plan's figures"
        whole = "the plan's hours" if self._deadline.steps is None else f"{self._deadline.steps:,} steps in all"
        started = "no start is measured yet" if pace.start_s is None else (
            f"a start takes {format_seconds(pace.start_s)}, a restore {format_seconds(pace.restore_s)}"
        )  # fmt: skip
        return f"by {whole} and the run's own times: a step takes {format_seconds(pace.step_s)}, {started}"


def last_moment_of(
    cluster: Cluster,
    spec: RunSpec,
    *,
    read_earlier: Callable[[], Report],
    market: PlayedMarket | None,
    gang: Gang | None,
) -> LastMoment | None:
    """Return what keeps the deadline of a plan; None if the plan has none, or does not go on demand for it.

    ``read_earlier`` returns the report of the run's sessions before this one. The time between two of them counts, but
    not in a played market, whose clock stands still in between."""
    conduct = cluster.conduct
    if conduct is None or conduct.fallback == "none" or cluster.deadline_s is None or cluster.work_h is None:
        return None
    earlier = read_earlier()
    began_s = time.monotonic() if market is not None or earlier.started_s is None else None

    def elapsed_s() -> float:
        if began_s is not None:
            return earlier.wall_s + time.monotonic() - began_s
        return time.time() - (earlier.started_s or 0.0)

    still_s = Rates().start_s if cluster.restore_s is None else cluster.restore_s
    return LastMoment(
        Deadline(
            hours=cluster.deadline_s / 3600, work_h=cluster.work_h, steps=spec.steps, still_h=still_s / 3600,
        ),
        SafetyNet(tries=conduct.fallback_tries),
        saves=parse_policy(spec.policy),
        elapsed_s=elapsed_s,
        speed=1.0 if market is None or not cluster.gang else market.speed(cluster.gang[0].instance),
        offered=(lambda planned: planned) if gang is None else gang.offered,
    )  # fmt: skip


def lacks_for_deadline(cluster: Cluster, steps: int | None) -> tuple[str, ...]:
    """Return a note if a plan goes on demand before its deadline, and something is not known for that; or if it does
    not, and the number of steps is given in vain."""
    if cluster.conduct is None or cluster.conduct.fallback == "none":
        return () if steps is None else ("--steps has no effect: the plan does not go on demand before a deadline",)
    if cluster.deadline_s is None or cluster.work_h is None:
        return ("the plan goes on demand at the last moment, but has no --work or no --deadline: it stays on spot",)
    if steps is not None:
        return ()
    return (
        f"the last moment before the deadline follows from the plan's {_time(cluster.work_h)} of work: give --steps N "
        "for the steps that are really left",
    )


def _needed_s(saves: PolicySaves, rest_s: float, span_h: float) -> float:
    """Return the time for this much training; beyond what the policy was asked about, in proportion."""
    known_h = min(rest_s / 3600, span_h)
    whole_h = float(saves.needed(span_h))
    return (float(saves.needed(known_h)) + (rest_s / 3600 - known_h) * whole_h / span_h) * 3600


def _on_demand(machine: Machine) -> Machine:
    usd = machine.on_demand_usd_per_hour
    return replace(machine, market="on-demand", usd_per_hour=math.nan if usd is None else usd)


def _place(machine: Machine) -> str:
    where = machine.zone or machine.region or "its place"
    return f"{where} ({machine.instance}, {format_usd(machine.usd_per_hour)}/h each)"


def _time(hours: float) -> str:
    return format_seconds(hours * 3600)
