"""Parse HOST:PORT as users write it into what sockets take: one parser for nodes, hubs and their clients."""

from __future__ import annotations

import ipaddress

from deepvm.errors import UsageError


def split_address(address: str, *, listen: bool = False) -> tuple[str, int]:
    """Split ``127.0.0.1:7070``, ``[::1]:7070`` or ``node.example:7070``. Port 0 (any free one) is for listening."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"{address!r} is ambiguous: write an IPv6 address like [::1]:7070")
    if not colon or not _is_host(host) or not _is_port(port, least=0 if listen else 1):
        raise UsageError(f"{address!r} is not a valid address: write HOST:PORT, like 10.0.0.9:7070")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric_ip(text: object) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse a socket's IP address; without an interface's name, and IPv4 that is written as IPv6 as IPv4."""
    address = ipaddress.ip_address(str(text).partition("%")[0])
    return (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address


def _is_port(text: str, *, least: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and least <= int(text) <= 65535


def _is_host(text: str) -> bool:
    """True if the resolver takes it: for other text it raises something else than OSError."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return bool(text) and text.isprintable() and not set(text) & set(" /@[]?#")
