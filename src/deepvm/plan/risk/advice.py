"""Advice on a plan under a market: what was judged in, lines for the user out."""

from __future__ import annotations

from deepvm.plan.risk.search import Found
from deepvm.units import format_usd

_FASTER = 0.5  # of the time: an alternative that is worth its mention
_DEARER = 1.5  # times the cost at most


def advice_of(found: Found) -> tuple[str, ...]:
    return tuple(line for line in (_degenerate(found), _guess(found)) if line is not None)


def _degenerate(found: Found) -> str | None:
    """Expected cost alone prefers few machines for a long time: say so, and name a faster plan."""
    best = found.best[0]
    request = best.trial.board.request
    if request.objective != "cost" or request.deadline_s is not None or request.usd_per_hour_of_waiting:
        return None
    hours, usd = best.risk.mean_h, best.risk.mean_usd
    text = f"cost alone favours few machines for a long time (here {hours:.1f}h)"
    faster = [
        one
        for one in found.judged
        if one.kept and one.risk.mean_h <= _FASTER * hours and one.risk.mean_usd <= _DEARER * usd
    ]
    remedy = "give --deadline, or --usd-per-hour-of-waiting"
    if not faster:
        return f"{text}: {remedy}"
    other = min(faster, key=lambda one: one.risk.mean_usd)
    return (
        f"{text}: {other.risk.mean_h:.1f}h would cost {format_usd(other.risk.mean_usd)} instead of {format_usd(usd)}; "
        f"{remedy}"
    )


def _guess(found: Found) -> str | None:
    history = found.best[0].risk.history
    if found.best[0].trial.market is None or history.enough:
        return None
    return f"the risk is a guess: {history}"
