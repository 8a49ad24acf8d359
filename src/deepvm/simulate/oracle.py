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
_ROUNDS = 18  # of bisection: the reward is known to 1 part in 260,000


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
    best = np.zeros(len(starts))
    for _ in range(_ROUNDS):
        reward = (low + high) / 2
        value, worked = _best_path(cost, allowed, reward, market.tick_h, penalty_h)
        best = np.maximum(best, value + reward * needed_h)
        enough = worked >= needed_h - 1e-9
        high, low = np.where(enough, reward, high), np.where(enough, low, reward)
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


def _best_path(
    cost: Floats, allowed: NDArray[np.bool_], reward: Floats, tick_h: float, penalty_h: float
) -> tuple[Floats, Floats]:
    """Return the least cost minus reward over all paths, and the work of that path."""
    starts, ticks, choices = cost.shape
    value, work = np.full((starts, choices), np.inf), np.zeros((starts, choices))
    idle, idle_work = np.zeros(starts), np.zeros(starts)
    rows = np.arange(starts)
    gain, lost = reward[:, None] * tick_h, reward * penalty_h
    for tick in range(ticks):
        best = value.argmin(axis=1)
        elsewhere = value[rows, best]
        from_idle = idle <= elsewhere
        enter = np.where(from_idle, idle, elsewhere) + lost
        enter_work = np.where(from_idle, idle_work, work[rows, best]) - penalty_h
        stays = value <= enter[:, None]
        idle_work = np.where(from_idle, idle_work, work[rows, best])
        idle = np.minimum(idle, elsewhere)
        gained = np.where(stays, value, enter[:, None]) + cost[:, tick] - gain
        value = np.where(allowed[:, tick], gained, np.inf)
        work = np.where(stays, work, enter_work[:, None]) + tick_h
    best = value.argmin(axis=1)
    ends_idle = idle <= value[rows, best]
    return np.where(ends_idle, idle, value[rows, best]), np.where(ends_idle, idle_work, work[rows, best])
