"""Zones with little of everything: a cloud and a zone's name in, True for a local or edge zone out."""

from __future__ import annotations

import re

# EC2's local zones (us-east-1-bos-1a, use1-bos1-az1) and those of telephone networks (us-east-1-wl1-bos-wlz-1,
# use1-wl1-bos-wlz1), by name and by ID. Ordinary zones are us-east-1a and use1-az6.
_AWS_LOCAL = re.compile(r"[a-z]{2}(-[a-z]+)+-\d-.+|[a-z]+\d-(?!az\d).+")


def is_local(cloud: str, zone: str | None) -> bool:
    """True for a zone near a city: few types, few machines, no spot market to move in."""
    return cloud == "aws" and zone is not None and _AWS_LOCAL.fullmatch(zone.lower()) is not None
