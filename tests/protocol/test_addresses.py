"""One parser reads every HOST:PORT."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm.errors import DeepvmError, StoreUnavailable, UsageError
from deepvm.memnode.settings import Settings
from deepvm.protocol.addresses import join_address, split_address
from deepvm.runtime.hub.client import HubClient
from deepvm.store.memory.connection import Connection
from deepvm.store.memory.store import MemoryStore


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.9:7070", "10.0.0.9", 7070), ("[::1]:1", "::1", 1), ("node-1.example:65535", "node-1.example", 65535)],
)
def test_addresses_are_read_and_written_alike(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)
    assert join_address(host, port) == text


def dial_link(address: str) -> None:
    HubClient.connect(address, token="t", machine="worker/0", address="127.0.0.1", workers=1, connect_s=0.1)


@pytest.mark.parametrize(
    "text",
    ["", "here", ":7070", "host:", "host:\u00b2", "host:-1", "host:65536", "host:" + "9" * 5000, "::1:7070", "a..b:1",
     "a b:1", "a\x00b:1", "x" * 70 + ".example:1", "http://host:1", "user@host:1", "host:7070/", "[::1:7070"],
)  # fmt: skip
@pytest.mark.parametrize(
    "reader",
    [split_address, Connection.connect, dial_link, lambda text: MemoryStore([text]),
     lambda text: Settings(listen=text, capacity_bytes=2**24)],
)  # fmt: skip
def test_what_is_not_an_address_is_a_sentence_wherever_it_is_given(reader: Callable[[str], object], text: str) -> None:
    with pytest.raises(UsageError, match=r"write (HOST:PORT, like 10|an IPv6 address)"):
        reader(text)


def test_port_0_is_for_listening_only() -> None:
    assert split_address("127.0.0.1:0", listen=True) == ("127.0.0.1", 0)
    with pytest.raises(UsageError, match="not a valid address"):
        split_address("127.0.0.1:0")


@given(st.text(max_size=80))
def test_no_text_makes_the_parser_fail_otherwise(text: str) -> None:
    for candidate in (text, f"{text}:7070", f"127.0.0.1:{text}"):
        try:
            host, port = split_address(candidate)
        except UsageError:
            continue
        assert host
        assert 0 < port < 65536


def test_a_name_that_nobody_knows_is_a_sentence() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        Connection.connect("no-such-host.invalid:1", connect_s=5)
    with pytest.raises(DeepvmError, match="no hub answers"):
        dial_link("no-such-host.invalid:1")
