"""Check the addresses that a node dials. They come from manifests, which any client may write.

Node 0 fetches chunks from the other nodes of a checkpoint (writeback/peers.py). Without ``--peers``, a node on loopback
dials loopback. Any other dials no loopback, link-local (where clouds have their metadata), multicast or unspecified
address, and from a private network only private ones. Ports below 1024 are never dialled.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from deepvm.errors import AccessDenied, StoreUnavailable, UsageError
from deepvm.protocol.addresses import numeric_ip, split_address

LEAST_PORT = 1024
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class PeerRule:
    """``allowed``: host names, addresses or networks like 10.0.0.0/16."""

    def __init__(self, own_host: str, allowed: Sequence[str] = ()) -> None:
        self._own_host, self._allowed = own_host, tuple(allowed)
        self._networks: list[_Network] = []
        self._names: set[str] = set()
        for text in allowed:
            try:
                self._networks.append(ipaddress.ip_network(text, strict=False))
            except ValueError:
                if "/" in text or not text.strip():
                    raise UsageError(
                        f"{text!r} is not a network: write it like 10.0.0.0/16, or a host's name"
                    ) from None
                self._names.add(text.lower())

    def check(self, address: str) -> None:
        """Raise AccessDenied for an address that this node does not dial."""
        host, port = split_address(address)
        if port < LEAST_PORT:
            raise AccessDenied(f"memory node {address} is not dialled: its port is below {LEAST_PORT}")
        if host.lower() in self._names:
            return
        for found in _resolve(host, port):
            allowed = any(found in network for network in self._networks) if self._allowed else self._is_like_own(found)
            if not allowed:
                raise AccessDenied(
                    f"memory node {address} is not dialled: {found} is not in this node's network; "
                    "if it is a node of this cluster, start this one with --peers"
                )

    def _is_like_own(self, found: _Address) -> bool:
        own = _resolve(self._own_host, 0)
        if all(one.is_loopback for one in own):
            return found.is_loopback
        if found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified:
            return False
        inside = all(one.is_private and not one.is_unspecified for one in own)
        return found.is_private or not inside


def _resolve(host: str, port: int) -> list[_Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StoreUnavailable(f"the host {host!r:.100} cannot be resolved: {error}") from None
    return [numeric_ip(row[4][0]) for row in found]
