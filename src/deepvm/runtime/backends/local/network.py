"""A network namespace for each local machine, with links of a given bandwidth.

A bridge in the namespace of ``deepvm run`` connects them, and the hub listens at the bridge's address. Stores beyond
the bridge (``s3://``) cannot be reached from inside. The next run, or ``deepvm run --down``, removes what a killed run
left.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from deepvm.errors import DeepvmError, UsageError

INTERFACE = "eth0"  # a machine's own, inside
_COMMAND_S = 20.0
_NAMESPACES = Path("/run/netns")
_LINKS = Path("/sys/class/net")
_OURS = re.compile(r"dvm-([0-9a-z]+)-\d+(-\d+)?\Z")  # a bridge; a machine's link and namespace: 15 letters at most
_POOLS = (ipaddress.IPv4Network("100.64.0.0/10"), ipaddress.IPv4Network("10.0.0.0/8"))  # the first is seldom in use
_BURST_S, _LEAST_BURST_BYTES = 0.01, 64_000  # what a link may send at once after a pause


class Network:
    """Made by ``create``; each machine joins it."""

    def __init__(
        self, bridge: str, subnet: ipaddress.IPv4Network, bandwidth_bits_per_s: int | None, burst_s: float = _BURST_S
    ) -> None:
        self._bridge, self._subnet, self._bandwidth_bits_per_s = bridge, subnet, bandwidth_bits_per_s
        self._burst_s = burst_s
        self._numbers: dict[str, int] = {}  # a machine keeps its address when it is replaced
        self._joined: set[str] = set()
        self._has_bridge = False

    @staticmethod
    def create(bandwidth_bits_per_s: int | None = None, *, burst_s: float = _BURST_S) -> Network:
        """Create the bridge. ``bandwidth_bits_per_s`` limits each machine's link, in each direction; after a pause, a
        link may send what it carries in ``burst_s`` at once."""
        _check_bandwidth(bandwidth_bits_per_s)
        if os.geteuid() != 0:
            raise UsageError("--isolate creates network namespaces, which only root may: run as root, or without it")
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise UsageError(f"--isolate needs {' and '.join(missing)}: install iproute2, or run without it")
        sweep()
        network = Network(_free_name(), _free_subnet(taken=_subnets_in_use()), bandwidth_bits_per_s, burst_s)
        network._add_bridge()
        return network

    @property
    def address(self) -> str:
        """Return the bridge's address, where the hub listens."""
        return str(self._subnet[1])

    def address_of(self, machine: str) -> str:
        number = self._numbers.setdefault(machine, len(self._numbers))
        if number + 2 >= self._subnet.num_addresses - 1:
            raise UsageError(f"{machine} is one machine too many for {self._subnet}: isolate at most {number}")
        return str(self._subnet[number + 2])

    def join(self, machine: str) -> Path:
        """Return the file of the machine's namespace, and create it if needed."""
        address = self.address_of(machine)
        if machine not in self._joined:
            self._add_bridge()
            self._joined.add(machine)
            try:
                self._link(self._name_of(machine), address)
            except BaseException:
                self.leave(machine)
                raise
        return _NAMESPACES / self._name_of(machine)

    def _link(self, name: str, address: str) -> None:
        _run("ip", "netns", "add", name)
        peer = f"peer name {INTERFACE} address {_mac(address)} netns {name}"
        _batch("ip", f"link add {name} type veth {peer}", f"link set {name} master {self._bridge} up")
        inside = f"address add {address}/{self._subnet.prefixlen} dev {INTERFACE}"
        _batch("ip", "link set lo up", inside, f"link set {INTERFACE} up", namespace=name)
        self._limit(name)

    def limit(self, bandwidth_bits_per_s: int | None) -> None:
        """Change the limit of every machine's link; None: no limit."""
        _check_bandwidth(bandwidth_bits_per_s)
        before, self._bandwidth_bits_per_s = self._bandwidth_bits_per_s, bandwidth_bits_per_s
        for machine in self._joined:
            name = self._name_of(machine)
            if bandwidth_bits_per_s is None and before is not None:
                _batch("tc", f"qdisc del dev {name} root")
                _batch("tc", f"qdisc del dev {INTERFACE} root", namespace=name)
            self._limit(name)

    def _limit(self, name: str) -> None:
        if (rate := self._bandwidth_bits_per_s) is not None:
            burst = max(_LEAST_BURST_BYTES, round(rate / 8 * self._burst_s))
            limit = f"root tbf rate {rate}bit burst {burst} latency 50ms"
            _batch("tc", f"qdisc replace dev {name} {limit}")
            _batch("tc", f"qdisc replace dev {INTERFACE} {limit}", namespace=name)

    def leave(self, machine: str) -> None:
        if machine in self._joined:
            _remove(self._name_of(machine))
            self._joined.discard(machine)

    def close(self) -> None:
        """Remove everything. A machine that joins later creates it again, with the same addresses."""
        for machine in list(self._joined):
            self.leave(machine)
        _remove(self._bridge)
        self._has_bridge = False

    def _add_bridge(self) -> None:
        if self._has_bridge:
            return
        try:  # a bridge without an address of its own takes the lowest of its ports', which change
            _batch(
                "ip",
                f"link add {self._bridge} address {_mac(self.address)} type bridge",
                f"address add {self.address}/{self._subnet.prefixlen} dev {self._bridge}",
                f"link set {self._bridge} up",
            )
        except BaseException:
            _remove(self._bridge)
            raise
        self._has_bridge = True

    def _name_of(self, machine: str) -> str:
        return f"{self._bridge}-{self._numbers[machine]}"


def sweep() -> list[str]:
    """Remove what ended processes left behind, and return the names."""
    left = [
        name for name in _existing()
        if (found := _OURS.match(name)) and not Path(f"/proc/{int(found[1], 36)}").exists()
    ]  # fmt: skip
    if left and os.geteuid() != 0:
        raise UsageError(f"a killed run left {', '.join(left)}, which only root may remove: run as root")
    for name in left:
        _remove(name)
    return left


def _existing() -> list[str]:
    namespaces = os.listdir(_NAMESPACES) if _NAMESPACES.is_dir() else []
    return sorted({*os.listdir(_LINKS), *namespaces})


def _remove(name: str) -> None:
    for kind, place in (("link", _LINKS), ("netns", _NAMESPACES)):
        if (place / name).exists():
            try:
                _run("ip", kind, "delete", name)
            except DeepvmError:
                if (place / name).exists():  # else another run has swept it
                    raise


def _free_name() -> str:
    owner, existing = _base36(os.getpid()), set(_existing())
    for number in range(10):
        if (name := f"dvm-{owner}-{number}") not in existing:
            return name
    raise DeepvmError("10 isolated clusters are up in this process: end one of them first")


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return digits[number] if number < 36 else _base36(number // 36) + digits[number % 36]


def _free_subnet(taken: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    in_use = list(taken)
    for pool in _POOLS:
        count = pool.num_addresses // 256
        for offset in range(count):
            number = (os.getpid() * 8 + offset) % count  # runs that start together look in different places
            subnet = ipaddress.IPv4Network((int(pool[0]) + 256 * number, 24))
            if not any(subnet.overlaps(other) for other in in_use):
                return subnet
    raise DeepvmError(f"every network in {' and '.join(map(str, _POOLS))} is in use here: --isolate has no address")


def _subnets_in_use() -> list[ipaddress.IPv4Network]:
    found = []
    for line in _run("ip", "-4", "-o", "route", "show", "table", "all").splitlines():
        for word in line.split()[:2]:  # "100.64.0.0/24 dev ..." or "local 100.64.0.1 dev ..."
            try:
                found.append(ipaddress.IPv4Network(word))
            except ValueError:
                continue
    return found


def _check_bandwidth(bits_per_s: int | None) -> None:
    if bits_per_s is not None and bits_per_s < 8000:
        raise UsageError(f"the bandwidth is {bits_per_s} bit/s: it must be at least 8000")


def _mac(address: str) -> str:
    """Return a MAC address by the IP address, so that a replacement has the address of its predecessor."""
    return ":".join(f"{byte:02x}" for byte in (2, 0, *ipaddress.IPv4Address(address).packed))


def _batch(tool: str, *lines: str, namespace: str | None = None) -> None:
    inside = () if namespace is None else ("-n", namespace)
    _run(tool, *inside, "-batch", "-", stdin="\n".join(lines) + "\n")


def _run(*words: str, stdin: str = "") -> str:
    try:
        done = subprocess.run(words, check=True, capture_output=True, timeout=_COMMAND_S, input=stdin, text=True)
    except (subprocess.SubprocessError, OSError) as error:
        reason = " ".join(str(getattr(error, "stderr", "") or error).split())
        what = " ".join((*words, *stdin.splitlines()))
        raise DeepvmError(f"--isolate cannot create its network: `{what}` failed: {reason}") from None
    return done.stdout
