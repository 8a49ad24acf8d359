"""Sizes, money and durations as users write and read them."""

from __future__ import annotations

import math

import pytest

from deepvm import units
from deepvm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("300", 300),
        ("1b", 1),
        ("300MB", 300_000_000),
        ("300MiB", 314_572_800),
        ("1.5kB", 1500),
        ("2p", 2 * 10**15),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["-1", "-1GB", "5 parsecs", "", "1e999GB", "GB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        units.parse_bytes(text)


def test_counts() -> None:
    found = [units.format_count(count, "machine") for count in (0, 1, 1.0, 1.5, 2, 12_345)]
    assert found == ["0 machines", "1 machine", "1 machine", "1.5 machines", "2 machines", "12,345 machines"]


def test_gpu_memory() -> None:
    assert [units.parse_gpu_gb(text) for text in ("24", "24GB", "24GiB", "24000MB", "24576MiB", "0.024TB")] == [24] * 6
    for text in ("0", "-1"):
        with pytest.raises(UsageError, match="not a size of GPU memory"):
            units.parse_gpu_gb(text)


def test_durations() -> None:
    assert [units.parse_seconds(text) for text in ("0", "90s", "1.5min", "2h", "250ms", "1d")] == [
        0, 90, 90, 7200, 0.25, 86400,
    ]  # fmt: skip
    with pytest.raises(UsageError, match="negative"):
        units.parse_seconds("-1s")


def test_money() -> None:
    assert [units.parse_usd(text) for text in ("0", "$3", " 3.50", 2)] == [0, 3, 3.5, 2]
    for text in ("-1", "inf", "nan", "much"):
        with pytest.raises(UsageError, match="not an amount of money"):
            units.parse_usd(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.4, "999 B"),
        (999.5, "1 kB"),
        (1490, "1.49 kB"),
        (-2e6, "-2 MB"),
        (5e18, "5e+03 PB"),
    ],
)
def test_sizes_for_users(count: float, text: str) -> None:
    assert units.format_bytes(count) == text


@pytest.mark.parametrize(
    ("usd", "text"), [(99.99, "$99.9900"), (100, "$100.00"), (1234.5, "$1,234.50"), (0.1, "$0.1000")]
)
def test_money_for_users(usd: float, text: str) -> None:
    assert units.format_usd(usd) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "250 ms"), (1, "1 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"),
        (172_799, "48 h"), (172_800, "2 d"),
    ],
)  # fmt: skip
def test_durations_for_users(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("days", "text"),
    [(0, "today"), (0.99, "today"), (1, "1 day old"), (1.99, "1 day old"), (2, "2 days old"), (math.pi, "3 days old")],
)
def test_ages_for_users(days: float, text: str) -> None:
    assert units.format_days(days) == text


def test_hours_are_rounded_up() -> None:
    assert [units.format_hours_up(hours) for hours in (24.1004, 24.11, 24.0, 0.1 + 0.2)] == [
        "24.11", "24.11", "24.00", "0.30"
    ]  # fmt: skip


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e308, -1e308, 2**63, math.inf, math.nan, 0])
def test_any_number_can_be_shown(value: float) -> None:
    for show in (units.format_bytes, units.format_seconds, units.format_usd, units.format_days):
        assert show(value)
