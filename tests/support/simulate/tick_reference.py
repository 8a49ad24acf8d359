"""A simulator that walks tick by tick, with every phase of a run written out: what replay.py has to agree with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepvm.market.market import Market
from deepvm.policy.notice import at_notice
from deepvm.policy.placement import WAIT
from deepvm.simulate.job import GangJob
from deepvm.simulate.saves import FixedInterval
from deepvm.simulate.strategy import Strategy

_NOW = 1e-12


@dataclass
class Run:
    """One run. ``work`` counts what was trained in this spell; ``safe`` what survives its loss."""

    market: Market
    job: GangJob
    strategy: Strategy
    start_h: float
    now: float = 0.0
    done: float = 0.0  # safe before this spell
    work: float = 0.0
    safe: float = 0.0
    zone: int = WAIT
    last_zone: int = WAIT
    until_training: float = 0.0
    until_save: float = 0.0
    stalled: float = 0.0
    saves: list[tuple[float, float]] = field(default_factory=list)  # when each is safe, and the work in it
    spot_usd: float = 0.0
    lost: float = 0.0
    trained: float = 0.0
    machines: int = 0
    losses: int = 0
    moves: int = 0
    finished: bool = False
    count: NDArray[np.int64] = field(default_factory=lambda: np.zeros((1, 1), np.int64))  # [zone, tick]: machines
    leave: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((1, 1), bool))
    speed: float = 1.0
    told_at: float = math.inf  # when the loss of this spell is announced
    stopped: bool = False  # since the save at that notice

    def go(self) -> Run:
        self.now = self.start_h
        market = self.market
        most = self.strategy.spot(self.job)
        least = self.strategy.least or most
        up = market.capacity >= least
        count = np.where(up, np.minimum(market.capacity, most), 0)
        self.count = count
        speeds = self.strategy.speeds(self.job)
        choice = self.strategy.placement.choose(up, market.price)
        leave = self.leave = self.strategy.placement.leave(up, market.price)
        for tick in range(int(self.start_h / market.tick_h + 1e-9), market.ticks):
            end = (tick + 1) * market.tick_h
            if self.zone != WAIT:
                self._market_changes(tick, int(count[self.zone, tick]), bool(leave[self.zone, tick]))
            if self.zone == WAIT and choice[tick] != WAIT:
                self._enter(int(choice[tick]), tick)
            if self.zone == WAIT:
                self.now = end
                continue
            self.machines = int(count[self.zone, tick])
            self.speed = float(speeds[self.machines])
            self._advance(end, market.price[self.zone, tick] * self.machines)
            if self.finished:
                return self
        return self

    def _market_changes(self, tick: int, machines: int, leaves: bool) -> None:
        """Machines that are gone are a loss, also at a moment at which the gang would move."""
        zone, before = self.zone, self.machines
        if machines < before:
            self._lose()
        elif leaves or machines > before:
            self._leave()
        if machines != before and machines > 0 and not leaves:
            self._enter(zone, tick)
            self.until_training += self.strategy.regroup_h - self.strategy.start_h

    def _enter(self, zone: int, tick: int) -> None:
        strategy, moved = self.strategy, self.last_zone not in (WAIT, zone)
        self.moves += moved
        self.zone = self.last_zone = zone
        self.until_training = strategy.start_h
        if self.done > 0:
            self.until_training += strategy.restore_h + (strategy.move_h if moved else 0.0)
        self.work = self.safe = self.stalled = 0.0
        self.saves = []
        assert isinstance(strategy.saves, FixedInterval)
        self.until_save = strategy.saves.interval_h
        self.told_at, self.stopped = self._told_at(zone, tick), False

    def _told_at(self, zone: int, tick: int) -> float:
        """Look ahead to what ends this spell. A loss may be announced; a move or a larger gang is none."""
        notices, here = self.strategy.notices, int(self.count[zone, tick])
        for later in range(tick + 1, self.market.ticks):
            if self.count[zone, later] != here or self.leave[zone, later]:
                lost = self.count[zone, later] < here
                if notices is None or not lost or not notices.announced(np.array([zone]), np.array([later]))[0]:
                    return math.inf
                return later * self.market.tick_h - notices.hours
        return math.inf

    def _notice(self) -> None:
        """Save what the policy says, and stop: a machine leaves after its last save."""
        notices, saves = self.strategy.notices, self.strategy.saves
        assert notices is not None
        assert isinstance(saves, FixedInterval)
        self._mature()
        took = saves.stall_h + saves.remote_h
        under_way = [(self.now - (at - took), work) for at, work in self.saves if at > self.now + _NOW]
        age, covered = under_way[-1] if under_way else (None, self.safe)
        decision = at_notice(
            seconds_left=notices.seconds,
            unsaved_steps=int(self.work > covered + _NOW),
            save_s=took * 3600,
            under_way_for_s=None if age is None else age * 3600,
            policy=notices.policy,
        )
        self.safe = {"save": self.work, "finish": covered, "rely": self.safe}[decision.choice]
        self.saves, self.stopped, self.told_at = [], True, math.inf

    def _lose(self) -> None:
        self._mature()
        self.losses += 1
        self.lost += self.work - self.safe
        self.done += self.safe
        self.zone = WAIT

    def _leave(self) -> None:
        self.done += self.work
        self.zone = WAIT

    def _mature(self) -> None:
        self.safe = max([self.safe, *(work for at, work in self.saves if at <= self.now + _NOW)])

    def _advance(self, end: float, usd: float) -> None:
        saves = self.strategy.saves
        assert isinstance(saves, FixedInterval)
        while self.now < end - _NOW:
            if self.now >= self.told_at - _NOW:
                self._notice()
            left = min(end, self.told_at) - self.now
            if self.stopped:
                step = left
            elif self.until_training > _NOW:
                step = min(left, self.until_training)
                self.until_training -= step
            elif self.stalled > _NOW:
                step = min(left, self.stalled)
                self.stalled -= step
            else:
                rest = (self.job.work_h - self.done - self.work) / self.speed
                step = min(left, rest, self.until_save)
                self.work += step * self.speed
                self.trained += step * self.speed
                self.until_save -= step
                if rest - step <= _NOW:
                    self.finished = True
                elif self.until_save <= _NOW:
                    self.saves.append((self.now + step + saves.stall_h + saves.remote_h, self.work))
                    self.until_save, self.stalled = saves.interval_h, saves.stall_h
            self.now += step
            self.spot_usd += usd * step
            if self.finished:
                self.done = self.job.work_h
                return
