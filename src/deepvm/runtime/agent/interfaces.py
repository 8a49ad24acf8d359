"""This machine's address -> the network interface for gloo, NCCL and TensorPipe.

By default they look up the host's own name. Many systems map it to 127.0.1.1 in /etc/hosts, which no other machine can
reach.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_RTM_GETADDR, _NLM_F_REQUEST, _NLM_F_DUMP = 22, 0x1, 0x300  # rtnetlink(7)
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_WAIT_S = 2.0


def socket_variables(address: str | None, hub: str, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what to add to the workers' environment; variables that the user (``given``) has set stay."""
    given = os.environ if given is None else given
    missing = [name for name in VARIABLES if not given.get(name)]
    name = interface_of(address) if address else None
    if name is None:  # not given, or behind address translation: the interface towards the hub
        towards = _address_towards(hub)
        name = None if towards is None else interface_of(towards)
    return {} if name is None else dict.fromkeys(missing, name)


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address or host name; None if there is none."""
    try:
        wanted: set[tuple[int, str]] = {
            (found[0], str(found[4][0])) for found in socket.getaddrinfo(address.strip("[]"), None)
        }
        for family, found, index in _addresses():
            if (family, found) in wanted or (family == socket.AF_INET and _loops(found, wanted)):
                return socket.if_indextoname(index)
    except (OSError, UnicodeError, struct.error):
        return None
    return None


def _loops(found: str, wanted: set[tuple[int, str]]) -> bool:
    """True if this is loopback, and one of those is in 127.0.0.0/8: it lists only its first address."""
    return found == "127.0.0.1" and any(address.startswith("127.") for _, address in wanted)


def _address_towards(hub: str) -> str | None:
    host, _, port = hub.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # sends nothing: it only asks for the route
            return str(probe.getsockname()[0])
    except (OSError, ValueError, IndexError):
        return None


def _addresses() -> Iterator[tuple[int, str, int]]:
    """Return family, address and interface number of this machine's addresses, as the kernel lists them."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
        kernel.settimeout(_WAIT_S)
        kernel.bind((0, 0))
        kernel.send(struct.pack("=IHH16x", 24, _RTM_GETADDR, _NLM_F_REQUEST | _NLM_F_DUMP))  # of every family
        while True:
            got = kernel.recv(2**18)
            at = 0
            while at + 16 <= len(got):
                length, kind = struct.unpack_from("=IH", got, at)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                    return
                yield from _addresses_in(got[at + 16 : at + length])
                at += (length + 3) & ~3


def _addresses_in(message: bytes) -> Iterator[tuple[int, str, int]]:
    family, _, _, _, index = struct.unpack_from("=BBBBI", message)
    at = 8
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            return
        if kind in (_IFA_LOCAL, _IFA_ADDRESS) and family in (socket.AF_INET, socket.AF_INET6):
            yield family, socket.inet_ntop(family, message[at + 4 : at + length]), index
        at += (length + 3) & ~3
