"""Spot prices of past days from AWS: a region and a number of days in, the price at the end of every day out.

AWS keeps about 90 days. Its answer has the price in force at the first moment, and every change after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from typing import Any

from deepvm.catalog.report import Progress
from deepvm.catalog.sources import aws
from deepvm.catalog.sources.aws_answers import amount
from deepvm.errors import SourceFailed, UsageError

MOST_DAYS = 90
PriceRow = tuple[str, str, date, float]  # type, zone, day, USD an hour


def fetch_history(
    region: str, days: int, *, now: datetime | None = None, progress: Progress | None = None, **options: Any
) -> list[PriceRow]:
    """Read the last days' spot prices, one row for each type, zone and day with a change.

    ``options`` are those of ``aws.open_calls``: session, endpoint_url, time limits."""
    if not 1 <= days <= MOST_DAYS:
        raise UsageError(f"--history {days}: AWS keeps spot prices for 1 to {MOST_DAYS} days")
    end = now or datetime.now(timezone.utc)
    start = end - timedelta(days=days)
    calls = aws.open_calls(region, progress=progress, **options)
    pages = calls.pages(
        "ec2", region, "describe_spot_price_history", "SpotPriceHistory",
        ProductDescriptions=["Linux/UNIX"], StartTime=start, EndTime=end,
    )  # fmt: skip
    return list(end_of_days(pages, start))


def end_of_days(answers: Iterator[Any], start: datetime) -> Iterator[PriceRow]:
    """Keep the last price of each UTC day. A price from before ``start`` counts on the first day."""
    last: dict[tuple[str, str, date], tuple[datetime, float]] = {}
    for row in answers:
        usd = amount(row.get("SpotPrice"))
        if usd is None or not row.get("ProductDescription", "").startswith("Linux/UNIX"):
            continue
        try:
            when = row["Timestamp"].astimezone(timezone.utc)
            key = row["InstanceType"], row["AvailabilityZone"], max(when, start).date()
        except (KeyError, AttributeError, TypeError) as error:
            raise SourceFailed(f"AWS sent a spot price in an unknown format ({type(error).__name__})") from None
        if key not in last or when >= last[key][0]:
            last[key] = when, usd
    for (name, zone, day), (_, usd) in sorted(last.items()):
        yield name, zone, day, usd
