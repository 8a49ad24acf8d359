"""Replay a strategy on a market from many starts at once, hopping from event to event instead of from tick to tick.

All runs advance together, each to its own next event: a loss, a move, the end of the work, on-demand machines. Tables
hold the next event of every zone and tick, so that a hop costs the same after an hour as after a month.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepvm.errors import Infeasible, UsageError
from deepvm.market.market import Market
from deepvm.policy.placement import WAIT
from deepvm.simulate.job import GangJob
from deepvm.simulate.outcome import Outcomes
from deepvm.simulate.strategy import Strategy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_HOPS = 1_000_000
_INSTANT_H = 1e-9  # two moments closer than this are one: times are sums of floats
_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Tables:
    """For one market, gang and placement. Ticks beyond the market's end are ``market.ticks``."""

    machines: Ints  # [zone, tick]: with how many the gang trains; 0 where it cannot
    next_change: Ints  # [zone, tick]: the first tick after this one with another number
    next_leave: Ints  # [zone, tick]: the first tick from here on at which the placement moves it
    choice: Ints  # [tick + 1]: where to start, or WAIT; WAIT at the end
    next_choice: Ints  # [tick + 1]: the first tick from here on with a choice

    @classmethod
    def of(cls, market: Market, job: GangJob, strategy: Strategy) -> Tables:
        most = strategy.spot(job)
        least = most if strategy.least is None else min(strategy.least, most)
        machines = np.minimum(market.capacity, most).astype(np.int64)
        machines[machines < least] = 0
        up = market.capacity >= least
        choice = np.append(strategy.placement.choose(up, market.price), WAIT).astype(np.int64)
        changes = np.zeros(machines.shape, bool)
        changes[:, 1:] = machines[:, 1:] != machines[:, :-1]
        return cls(
            machines=machines,
            next_change=np.append(_next(changes), np.full((len(up), 1), market.ticks), axis=1)[:, 1:],
            next_leave=_next(strategy.placement.leave(up, market.price)),
            choice=choice,
            next_choice=np.append(_next((choice != WAIT)[None, :-1])[0], market.ticks),
        )


def _next(events: NDArray[np.bool_]) -> Ints:
    """Return, for every row and tick, the first tick from there on with an event; the number of ticks if none comes."""
    ticks = events.shape[1]
    at = np.where(events, np.arange(ticks), ticks)
    return np.minimum.accumulate(at[:, ::-1], axis=1)[:, ::-1].astype(np.int64)


def replay(
    market: Market, job: GangJob, strategy: Strategy, starts_h: ArrayLike, *, tables: Tables | None = None
) -> Outcomes:
    """Run the job once from every start, given in hours after the market's first tick.

    ``tables`` are those of an earlier strategy that differs in its saves, its overheads or its fallback alone.
    """
    starts = np.atleast_1d(np.asarray(starts_h, dtype=np.float64))
    if not starts.size or starts.min() < 0 or starts.max() >= market.hours:
        raise UsageError(f"starts must be from 0 h to the market's end at {market.hours:g} h, and at least one")
    return _Replay(market, job, strategy, starts, tables or Tables.of(market, job, strategy)).run()


class _Replay:
    def __init__(self, market: Market, job: GangJob, strategy: Strategy, starts: Floats, tables: Tables) -> None:
        self.market, self.job, self.strategy, self.starts = market, job, strategy, starts
        self.tables, self.speeds = tables, strategy.speeds(job)
        self.end_h = market.hours
        self.notice_h = 0.0 if strategy.notices is None else strategy.notices.hours
        count = len(starts)
        self.now = starts.copy()
        self.done = np.zeros(count)  # work that is safe
        self.zone = np.full(count, WAIT)  # where the newest checkpoint is
        self.stayed = np.zeros(count, bool)  # some machines of the last spell are still up
        self.columns = {name: np.zeros(count) for name in ("spot", "on_demand", "moved", "lost", "trained", "hired")}
        self.losses, self.moves = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.waited, self.finished = np.zeros(count), np.zeros(count, bool)
        rented, self.on_demand_speed = strategy.on_demand(job)
        self.on_demand_usd = float(market.on_demand_usd.min()) * rented
        if strategy.on_demand_only and not self.on_demand_speed:
            usd = float(market.on_demand_usd.min())
            raise Infeasible(f"the budget pays no on-demand machine at ${usd:.2f}/h: raise the budget")

    def run(self) -> Outcomes:
        running = np.arange(len(self.starts))
        for _ in range(MOST_HOPS):
            if not running.size:
                break
            self._hop(running)
            running = running[~self.finished[running] & (self.now[running] < self.end_h - _INSTANT_H)]
        hours = self.now - self.starts
        return Outcomes(
            hours=hours,
            spot_usd=self.columns["spot"],
            on_demand_usd=self.columns["on_demand"],
            keeper_usd=hours * self.strategy.keeper_usd,
            transfer_usd=self.columns["moved"],
            lost_h=self.columns["lost"],
            trained_h=self.columns["trained"],
            losses=self.losses,
            moves=self.moves,
            on_demand_h=self.columns["hired"],
            waiting_h=self.waited,
            finished=self.finished,
        )

    def _hop(self, runs: Ints) -> None:
        """Advance each run to its next event."""
        now = self.now[runs]
        tick = self._tick(now)
        start_tick = np.where(self.stayed[runs], tick, self.tables.next_choice[tick])
        spot_h = np.maximum(now, start_tick * self.market.tick_h)
        hire_h = self._hire_h(runs, spot_h <= now + _INSTANT_H)
        hires = hire_h < spot_h - _INSTANT_H
        if self.strategy.on_demand_only:
            hires[:], hire_h = True, now
        if hires.any():
            self._on_demand(runs[hires], np.maximum(hire_h[hires], now[hires]), spot_h[hires])
        spot = ~hires
        if spot.any():
            self._spot(runs[spot], spot_h[spot], start_tick[spot])

    def _tick(self, hours: Floats) -> Ints:
        return np.minimum((hours / self.market.tick_h + 1e-9).astype(np.int64), self.market.ticks)

    def _hire_h(self, runs: Ints, spot_is_up: NDArray[np.bool_]) -> Floats:
        """Return when each run rents on-demand machines if no spot machine comes before, on the market's clock."""
        fallback = self.strategy.fallback
        if fallback is None:
            return np.full(len(runs), np.inf)
        rest = self.strategy.rest(self.done[runs], self.job)
        return np.asarray(self.starts[runs] + np.where(spot_is_up, fallback.must_h(rest), fallback.from_h(rest)))

    def _spot(self, runs: Ints, begin: Floats, tick: Ints) -> None:
        market, saves, tables = self.market, self.strategy.saves, self.tables
        none_left = tick >= market.ticks
        if none_left.any():
            waiting = runs[none_left]
            self.waited[waiting] += self.end_h - self.now[waiting]
            self.now[waiting] = self.end_h
            runs, begin, tick = runs[~none_left], begin[~none_left], tick[~none_left]
        zone = np.where(self.stayed[runs], self.zone[runs], tables.choice[tick])
        self.waited[runs] += begin - self.now[runs]
        moved = self._arrive(runs, zone)
        change, leave = tables.next_change[zone, tick], tables.next_leave[zone, tick]
        event = np.minimum(change, leave)
        event_h = event * market.tick_h
        machines = tables.machines[zone, tick]
        after = np.where(event < market.ticks, tables.machines[zone, np.minimum(event, market.ticks - 1)], 0)
        in_order = (leave < change) | (after > machines)  # a move or a larger gang: saved before
        speed = self.speeds[machines]
        trains_h = self._ready_h(runs, begin, moved)
        elapsed = event_h - trains_h
        at_end = event_h >= self.end_h - _INSTANT_H  # the trace ends, and not the machines
        told = self._told(zone, event) & ~in_order & ~at_end
        elapsed = np.where(told, np.maximum(0.0, elapsed - self.notice_h), elapsed)
        needed = saves.needed((self.job.work_h - self.done[runs]) / speed)
        ends = needed <= elapsed + _INSTANT_H
        stop_h = np.where(ends, trains_h + needed, event_h)
        self._pay_spot(runs, zone, machines, begin, stop_h)
        trained = np.where(ends, self.job.work_h - self.done[runs], saves.trained(elapsed) * speed)
        kept = np.where(ends | in_order, trained, self._survives(told, elapsed) * speed)
        self.columns["trained"][runs] += trained
        self.columns["lost"][runs] += np.where(at_end, 0.0, trained - kept)
        self.losses[runs] += ~ends & ~in_order & ~at_end
        self.stayed[runs] = (after > 0) & ~(leave < change)
        self.done[runs] += kept
        self.finished[runs] = ends
        self.now[runs] = stop_h

    def _told(self, zone: Ints, event: Ints) -> NDArray[np.bool_]:
        """Return which losses are announced."""
        notices = self.strategy.notices
        return np.zeros(len(event), bool) if notices is None else notices.announced(zone, event)

    def _survives(self, told: NDArray[np.bool_], elapsed: Floats) -> Floats:
        """Return the training time whose work survives a loss, or its notice, after this time."""
        saves, notices = self.strategy.saves, self.strategy.notices
        safe = saves.safe(elapsed)
        return safe if notices is None or not told.any() else np.where(told, notices.kept(saves, elapsed), safe)

    def _arrive(self, runs: Ints, zone: Ints) -> NDArray[np.bool_]:
        """Bring the checkpoint to the zone; return which runs had to."""
        before = self.zone[runs]
        moved = (before != WAIT) & (before != zone)
        self.moves[runs] += moved
        carried = moved & (self.done[runs] > 0)
        usd = self.market.move_usd_per_gb[before[carried], zone[carried]] * self.job.checkpoint_bytes / _GB
        self.columns["moved"][runs[carried]] += usd
        self.zone[runs] = zone
        return np.asarray(carried)

    def _ready_h(self, runs: Ints, begin: Floats, moved: NDArray[np.bool_]) -> Floats:
        """Return when training begins."""
        strategy = self.strategy
        start = np.where(self.stayed[runs], strategy.regroup_h, strategy.start_h)
        restore = np.where(self.done[runs] > 0, strategy.restore_h, 0.0)
        return np.asarray(begin + start + restore + np.where(moved, strategy.move_h, 0.0))

    def _pay_spot(self, runs: Ints, zone: Ints, machines: Ints, begin: Floats, stop: Floats) -> None:
        self.columns["spot"][runs] += machines * (self._paid(zone, stop) - self._paid(zone, begin))

    def _paid(self, zone: Ints, hours: Floats) -> Floats:
        """Return what one machine costs from the market's beginning to a moment."""
        tick = np.minimum(self._tick(hours), self.market.ticks - 1)
        within = np.clip(hours - tick * self.market.tick_h, 0.0, self.market.tick_h)
        return np.asarray(self.market.paid[zone, tick] + within * self.market.price[zone, tick])

    def _on_demand(self, runs: Ints, begin: Floats, spot_h: Floats) -> None:
        """Train on on-demand machines to the end, or until spot machines are up and the fallback returns to them."""
        fallback, saves = self.strategy.fallback, self.strategy.saves
        self.waited[runs] += begin - self.now[runs]
        self.stayed[runs] = False
        trains_h = self._ready_h(runs, begin, np.zeros(len(runs), bool))
        speed = self.on_demand_speed
        stop_h = trains_h + saves.needed((self.job.work_h - self.done[runs]) / speed)
        returns = np.zeros(len(runs), bool)
        if fallback is not None and fallback.returns:
            hired = np.maximum(spot_h, trains_h + self.strategy.start_h)  # long enough to be worth it
            done = self.done[runs] + saves.trained(hired - trains_h) * speed
            stay_h = fallback.stay_h(self.strategy.rest(done, self.job))
            ahead = self.starts[runs] + stay_h > hired + self.strategy.margin_h
            returns = (hired < stop_h - _INSTANT_H) & ahead & (hired < self.end_h)
            stop_h = np.where(returns, hired, stop_h)
        trained = np.where(returns, saves.trained(stop_h - trains_h) * speed, self.job.work_h - self.done[runs])
        self.columns["on_demand"][runs] += (stop_h - begin) * self.on_demand_usd
        self.columns["hired"][runs] += stop_h - begin
        self.columns["trained"][runs] += trained
        self.done[runs] += trained
        self.finished[runs] = ~returns
        self.now[runs] = stop_h
