"""Advice on a plan under a market: what was judged in, lines for the user out."""

from __future__ import annotations

from deepvm.plan.risk.replays import Judged
from deepvm.plan.risk.search import Found
from deepvm.units import format_usd

_FASTER = 0.5  # of the time: an alternative that is worth its mention
_DEARER = 1.5  # times the cost at most
_HOURS_COUNT = 0.25  # the power of the time: half of it is worth 19 % more money


def advice_of(found: Found) -> tuple[str, ...]:
    return tuple(line for line in (_slow(found), _guess(found)) if line is not None)


def _slow(found: Found) -> str | None:
    """Expected cost alone prefers few machines for a long time: say so, and name a faster plan that costs little more.

    A deadline bounds the time, and says nothing of what an hour less is worth."""
    best = found.best[0]
    request = best.trial.board.request
    if request.objective != "cost" or request.usd_per_hour_of_waiting:
        return None
    hours, usd = best.risk.mean_h, best.risk.mean_usd
    text = f"cost alone favours few machines for a long time (here {hours:.1f}h)"
    due = request.deadline_s is not None
    remedy = "give --usd-per-hour-of-waiting" if due else "give --deadline, or --usd-per-hour-of-waiting"
    faster = [
        one
        for one in (*found.best, *found.judged)
        if one.kept and one.risk.mean_h <= _FASTER * hours and one.risk.mean_usd <= _DEARER * usd
    ]
    if not faster:
        return None if due else f"{text}: {remedy}"
    other = min(faster, key=_appeal)
    return (
        f"{text}: {other.risk.mean_h:.1f}h would cost {format_usd(other.risk.mean_usd)} instead of {format_usd(usd)}; "
        f"{remedy}"
    )


def _appeal(one: Judged) -> float:
    """Return what is least for the plan that a user would take: cost and time together."""
    return float(one.risk.mean_usd * one.risk.mean_h**_HOURS_COUNT)


def _guess(found: Found) -> str | None:
    history = found.best[0].risk.history
    if found.best[0].trial.market is None or history.enough:
        return None
    return f"the risk is a guess: {history}"
