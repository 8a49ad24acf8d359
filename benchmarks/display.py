"""Figures of a result as text, for the tables of one benchmark and for the summary of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def value(number: float, unit: str) -> str:
    """Return a figure with its unit; short times in milliseconds."""
    if unit != "s":
        return f"{number:,.4g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"
    return f"{number * 1000:.4g} ms" if number < 1 else f"{number:.3g} s"


def target(figures: Mapping[str, Any]) -> str:
    """Return what a measurement promises, or "" if nothing."""
    if figures["at_least"] is not None:
        return f">= {value(figures['at_least'], figures['unit'])}"
    return f"< {value(figures['below'], figures['unit'])}" if figures["below"] is not None else ""


def quartiles(figures: Mapping[str, Any]) -> str:
    """Return the spread of several runs."""
    if figures["runs"] < 2:
        return ""
    return f"{value(figures['low'], figures['unit'])} to {value(figures['high'], figures['unit'])}"
