"""Machines with a share of a CPU: a cloud and a machine type in, True if credits or neighbours decide its speed out.

Their CPUs and networks are fast for minutes, until credits end; a memory node receives checkpoints for days.
"""

from __future__ import annotations

import re

_BURSTABLE = {
    "aws": re.compile(r"t\d[a-z]*\."),
    "azure": re.compile(r"standard_b\d|basic_"),
    "gcp": re.compile(r"(e2-(micro|small|medium)|f1-micro|g1-small)$"),
    "do": re.compile(r"s-"),  # shared CPUs; c-, g-, m- and so- have their own
    "scaleway": re.compile(r"dev1-|play2-|stardust"),
    "ibm": re.compile(r"[a-z]+f-"),  # flex: may have less than a whole CPU
}


def is_burstable(cloud: str, instance: str) -> bool:
    pattern = _BURSTABLE.get(cloud)
    return pattern is not None and pattern.match(instance.lower()) is not None
