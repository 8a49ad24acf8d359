"""AWS's names and codes: an instance name or a quota code in; CPU architecture, family, quota out.

No requests, so that importing a file needs no cloud SDK.
"""

from __future__ import annotations

import re

from deepvm.catalog import accelerators
from deepvm.catalog.model import Market

_GRAVITON = re.compile(r"[a-z]+\d+g")  # c6g, m7gd, im4gn, t4g, g5g: the g follows the generation
_LETTERS = re.compile(r"[a-z]+")
_GENERATION = re.compile(r"p(\d+)")


def architecture_of(instance: str) -> str:
    series = instance.lower().partition(".")[0]
    arm = series == "a1" or series.startswith("mac2") or "gb200" in series or "gb300" in series
    return "arm64" if arm or _GRAVITON.match(series) else "x86_64"


def family_of(instance: str) -> str | None:
    """Return the letters before the generation, as AWS names its quotas: G, P, C, TRN."""
    match = _LETTERS.match(instance.lower())
    return match[0].upper() if match else None


def quota_family_of(instance: str) -> str | None:
    """Return ``family_of``, but P5 for P5 and later: AWS has separate spot quotas for P2 to P4 and from P5 on."""
    match = _GENERATION.match(instance.lower())
    return "P5" if match and int(match[1]) >= 5 else family_of(instance)


def accelerator_name(name: str, memory_gib: float | None) -> str:
    """Return the name of the accelerator with this memory: EC2 uses one name for both A100s."""
    known = accelerators.find(name)
    found = None if known is None or memory_gib is None else accelerators.of_size(known, memory_gib)
    return name if found is None or found is known else found.name


# "Standard" is A, C, D, H, I, M, R, T, Z; storage types with two letters count with their first.
_STANDARD = ("A", "C", "D", "H", "I", "IM", "IS", "M", "R", "T", "Z")
_G = ("G", "GR", "VT")
QUOTAS: dict[str, tuple[tuple[str, ...], Market]] = {
    "L-1216C47A": (_STANDARD, Market.ON_DEMAND),
    "L-34B43A08": (_STANDARD, Market.SPOT),
    "L-DB2E81BA": (_G, Market.ON_DEMAND),
    "L-3819A6DF": (_G, Market.SPOT),
    "L-417A185B": (("P", "P5"), Market.ON_DEMAND),
    "L-7212CCBC": (("P",), Market.SPOT),
    "L-C4BD4855": (("P5",), Market.SPOT),
    "L-6E869C2A": (("DL",), Market.ON_DEMAND),
    "L-85EED4F7": (("DL",), Market.SPOT),
    "L-74FC7D96": (("F",), Market.ON_DEMAND),
    "L-88CF9481": (("F",), Market.SPOT),
    "L-1945791B": (("INF",), Market.ON_DEMAND),
    "L-B5D1601B": (("INF",), Market.SPOT),
    "L-2C3B7624": (("TRN",), Market.ON_DEMAND),
    "L-6B0D517C": (("TRN",), Market.SPOT),
    "L-7295265B": (("X",), Market.ON_DEMAND),
    "L-E3A00192": (("X",), Market.SPOT),
    "L-F7808C92": (("HPC",), Market.ON_DEMAND),
    "L-43DA4232": (("U",), Market.ON_DEMAND),
}
