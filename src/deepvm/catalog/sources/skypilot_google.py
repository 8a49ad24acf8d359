"""Google's hosts and GPUs in SkyPilot's file, which prices them apart: rows in, rows of whole machines out.

A host of the A and G series has its GPUs in its name. An N1 host may have several, so that each of its machines with
GPUs is a type of its own: ``n1-standard-8+T4:1``. Both halves must be in the same zone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from deepvm.catalog.clouds import google
from deepvm.catalog.model import Instance

Facts = tuple[str, ...]  # type, accelerator, its count, vCPUs, memory, GPU info, CPU architecture
NO_HOST = "no instance type: an accelerator priced without its host"
NO_GPUS = "a host whose price leaves out its accelerators"


@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """A row of a host or of GPUs."""

    facts: Facts
    price: str
    spot_price: str
    region: str
    zone: str
    line: int


class Halves:
    """The halves of a file, until all rows are read."""

    def __init__(self) -> None:
        self._hosts: list[Half] = []
        self._gpus: dict[tuple[str, int, str, str], Half] = {}

    def take(self, half: Half) -> bool:
        """Keep a half for ``joined``. True if the row has no other use: an N1 host without GPUs is a machine too."""
        name, accelerator, count = (text.strip() for text in half.facts[:3])
        if not name and accelerator:
            try:
                key = (accelerator, int(float(count)), half.region, half.zone)
            except (ValueError, OverflowError):
                return False
            return self._gpus.setdefault(key, half) is half
        if accelerator:
            return False
        if google.gpus_of(name):
            self._hosts.append(half)
            return google.needs_gpus(name)
        return False

    def joined(
        self, add: Callable[[Half], str | None], amount: Callable[[str], float]
    ) -> Iterator[tuple[int, str | None]]:
        """Join the halves and give each machine to ``add``. Yield each taken row's line, and the reason to leave it
        out or None. ``amount`` parses a price, NaN if there is none."""
        used: set[int] = set()
        for host in self._hosts:
            name = host.facts[0].strip()
            reason: str | None = NO_GPUS
            alone = not google.needs_gpus(name)
            for gpu, count in google.gpus_of(name):
                gpus = self._gpus.get((gpu, count, host.region, host.zone))
                if gpus is not None:
                    reason = add(_machine(host, gpus, amount, f"{name}+{gpu}:{count}" if alone else name))
                    if reason is None:
                        used.add(gpus.line)
            if not alone:
                yield host.line, reason
        for gpus in self._gpus.values():
            yield gpus.line, None if gpus.line in used else NO_HOST


def _machine(host: Half, gpus: Half, amount: Callable[[str], float], name: str) -> Half:
    """Return the row of a host with its GPUs. A price that one half lacks is missing."""
    _, _, _, vcpus, memory, _, arch = host.facts
    _, gpu, count, _, _, info, _ = gpus.facts
    usd = amount(host.price) + amount(gpus.price)
    spot_usd = amount(host.spot_price) + amount(gpus.spot_price)
    return replace(
        host,
        facts=(name, gpu, count, vcpus, memory, info, arch),
        price=_text(usd),
        spot_price=_text(spot_usd),
    )


def _text(usd: float) -> str:
    return "" if usd != usd else repr(round(usd, 6))


def with_bandwidths(instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
    """Add the bandwidths of machines with GPUs."""
    known = ((i, google.sustained_gbps(i.name.partition("+")[0]) if i.accelerator else None) for i in instances)
    return tuple(i if gbps is None else replace(i, sustained_gbps=gbps) for i, gbps in known)
