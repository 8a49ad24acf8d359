"""What nobody could beat: the least that a job can cost on a market, for one who knows it in advance.

A lower bound by Lagrange: every hour of work is rewarded, and the best path through zones, on-demand machines and
waiting is found tick by tick. For any reward, its cost plus the reward of the missing work is at most the cost of
any strategy that finishes within the window and pays ``start_h`` at every start. The largest of these bounds is taken.
Saves, restores, traffic and machines that keep checkpoints are free, so the bound is a little below what is possible.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepvm.errors import UsageError
from deepvm.market.market import Market
from deepvm.simulate.job import GangJob

Floats = NDArray[np.float64]
_ROUNDS, _AT_ONCE = 6, 7  # of search, and rewards in each: the best is known to 1 part in 260,000


def lower_bound_usd(
    market: Market, job: GangJob, starts_h: ArrayLike, *, window_h: float | None = None, start_h: float = 0.0
) -> Floats:
    """Return, for each start, a cost in dollars that no strategy can go below, on spot or on-demand machines.

    Time counts with ``job.usd_per_hour_of_waiting``. ``window_h`` is the time within which the job must end: the
    deadline unless given. Starts are rounded down to the start of their tick.
    """
    window = job.deadline_h if window_h is None else window_h
    if window is None:
        raise UsageError("a lower bound needs a window: give a deadline, or window_h")
    starts = np.atleast_1d(np.asarray(starts_h, dtype=np.float64))
    ticks = int(np.ceil(window / market.tick_h - 1e-9))
    first = (starts / market.tick_h + 1e-9).astype(np.int64)
    cost, allowed = _costs(market, job.machines, first, ticks)
    needed_h = max(0.0, job.work_h - market.tick_h)  # the last tick may be used in part
    penalty_h = min(start_h, market.tick_h)  # a shorter start cannot be told from none within one tick
    low, high = np.zeros(len(starts)), np.full(len(starts), 2.0 * float(cost[allowed].max(initial=0.0)) / market.tick_h)
    best, rows = np.zeros(len(starts)), np.arange(len(starts))
    for _ in range(_ROUNDS):
        rewards = low + (high - low) * np.arange(1, _AT_ONCE + 1)[:, None] / (_AT_ONCE + 1)
        value, worked = _best_paths(cost, allowed, rewards, market.tick_h, penalty_h)
        best = np.maximum(best, (value + rewards * needed_h).max(axis=0))
        enough = worked >= needed_h - 1e-9
        first = np.where(enough.any(axis=0), enough.argmax(axis=0), _AT_ONCE)
        steps = np.concatenate([low[None], rewards, high[None]])
        low, high = steps[first, rows], steps[first + 1, rows]
    return best + job.usd_per_hour_of_waiting * job.work_h


def _costs(market: Market, machines: int, first: NDArray[np.int64], ticks: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return [start, tick, choice]: dollars of one tick in each zone and on demand, and where that is possible.

    Beyond the end of the market only on-demand machines are left."""
    at = first[:, None] + np.arange(ticks)
    known = at < market.ticks
    at = np.minimum(at, market.ticks - 1)
    spot = np.moveaxis(market.price[:, at], 0, -1) * machines * market.tick_h
    up = np.moveaxis(market.capacity[:, at] >= machines, 0, -1) & known[..., None]
    on_demand = np.full((*at.shape, 1), float(market.on_demand_usd.min()) * machines * market.tick_h)
    return np.concatenate([spot, on_demand], axis=-1), np.concatenate([up, np.ones_like(on_demand, bool)], axis=-1)


def _best_paths(
    cost: Floats, allowed: NDArray[np.bool_], rewards: Floats, tick_h: float, penalty_h: float
) -> tuple[Floats, Floats]:
    """Return, for [reward, start], the least cost minus reward over all paths, and the work of that path."""
    _, ticks, choices = cost.shape
    shape = rewards.shape
    value, work = np.full((*shape, choices), np.inf), np.zeros((*shape, choices))
    idle, idle_work = np.zeros(shape), np.zeros(shape)
    gain, lost = rewards[..., None] * tick_h, rewards * penalty_h

    def best() -> tuple[Floats, Floats]:
        at = value.argmin(axis=-1)[..., None]
        return np.take_along_axis(value, at, -1)[..., 0], np.take_along_axis(work, at, -1)[..., 0]

    for tick in range(ticks):
        elsewhere, elsewhere_work = best()
        from_idle = idle <= elsewhere
        idle_work = np.where(from_idle, idle_work, elsewhere_work)
        idle = np.minimum(idle, elsewhere)
        enter = (idle + lost)[..., None]
        stays = value <= enter
        work = np.where(stays, work, (idle_work - penalty_h)[..., None]) + tick_h
        value = np.where(allowed[:, tick], np.where(stays, value, enter) + cost[:, tick] - gain, np.inf)
    elsewhere, elsewhere_work = best()
    return np.minimum(idle, elsewhere), np.where(idle <= elsewhere, idle_work, elsewhere_work)
