"""Parse sizes, money and durations as users write them, and format them for users."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from deepvm.errors import UsageError

USD_DECIMALS = 9  # sums of prices that are equal on paper compare equal once rounded
USD_TOLERANCE = 1e-6  # prices are sums of floats; a millionth of a dollar is never a reason

_BYTES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTES[_letter] = _BYTES[_letter + "b"] = 1000**_power
    _BYTES[_letter + "ib"] = 1024**_power
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z]*)\s*\Z")


def parse_bytes(text: str | int) -> int:
    """Parse a size: ``300MB`` is 300,000,000 bytes, ``300MiB`` is 314,572,800, ``300`` is 300."""
    return round(_quantity(text, _BYTES, "a size", "300MB, 1.5GiB"))


def parse_gpu_gb(text: str | float) -> float:
    """Parse the size that a GPU is sold by: ``24``, ``24GB`` and ``24GiB`` all mean the cards of 24 GB."""
    factors = {"": 1.0, "g": 1.0, "gb": 1.0, "gib": 1.0, "m": 1e-3, "mb": 1e-3, "mib": 1 / 1024, "t": 1e3, "tb": 1e3}
    value = _quantity(text, factors, "a size of GPU memory", "24 or 24GB")
    if value == 0:
        raise UsageError(f"{text!r} is not a size of GPU memory: it must be above zero")
    return value


def parse_seconds(text: str | float) -> float:
    """Parse a duration: ``90``, ``90s``, ``1.5min``, ``2h``, ``250ms``."""
    return _quantity(text, {"": 1.0, **_SECONDS}, "a duration", "90s, 15min, 2h")


def parse_usd(text: str | float) -> float:
    """Parse an amount of US dollars: ``3``, ``$3``, ``3.50``; finite and not negative."""
    cleaned = text.strip().removeprefix("$") if isinstance(text, str) else text
    try:
        value = float(cleaned)
    except ValueError:
        raise UsageError(f"{text!r} is not an amount of money: write it like 3 or 0.75") from None
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{text!r} is not an amount of money: it must be finite and not negative")
    return value


def _quantity(text: str | float, factors: Mapping[str, float], what: str, example: str) -> float:
    match = _QUANTITY.match(str(text))
    if match is None or match[2].lower() not in factors:
        raise UsageError(f"{text!r} is not {what}: write it like {example}")
    value = float(match[1]) * factors[match[2].lower()]
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{text!r} is not {what}: it must be finite and not negative")
    return value


def format_bytes(count: float) -> str:
    """Format with decimal units and three digits: 300 MB, 1.49 GB."""
    value, unit = _as_float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def _as_float(value: float) -> float:
    """Return a number as a float; infinity for an integer that is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def format_count(count: float, what: str) -> str:
    """Format a count and its noun: ``1 machine``, ``2 machines``."""
    return f"{count:,.12g} {what}{'' if count == 1 else 's'}"


def format_usd(usd: float) -> str:
    """Format with cents from $100 on, and with hundredths of a cent below, as spot prices need."""
    usd = _as_float(usd)
    return f"${usd:,.2f}" if abs(usd) >= 100 else f"${usd:.4f}"


def format_seconds(seconds: float) -> str:
    seconds = _as_float(seconds)
    for below, unit_s, unit in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < below:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


def format_hours_up(hours: float) -> str:
    """Format hours with two digits, rounded up: a limit that is read back is never below the figure."""
    return f"{math.ceil(hours * 100 - 1e-9) / 100:.2f}"


def format_days(days: float) -> str:
    days = _as_float(days)
    if days < 1:
        return "today"
    return "1 day old" if days < 2 else f"{days:.0f} days old"
