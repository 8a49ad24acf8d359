"""What may be measured: numbers, rates and sizes that make sense, and fit into this machine."""

from __future__ import annotations

import shutil

import pytest

from deepvm.calibrate.network.settings import (
    NetworkSettings,
    free_memory_bytes,
    no_links_because,
    parse_rates,
)
from deepvm.calibrate.overheads.settings import OverheadSettings, parse_sizes
from deepvm.cli.calibrate.session import parse_counts
from deepvm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "found"), [("1,2,4", (1, 2, 4)), ("1..4", (1, 2, 3, 4)), ("4, 1..2,1", (1, 2, 4)), ("7", (7,))]
)
def test_counts_are_written_as_lists_and_ranges(text: str, found: tuple[int, ...]) -> None:
    assert parse_counts(text, "--workers") == found


@pytest.mark.parametrize("text", ["", "a", "1..", "..2", "1,,2", "1.5", "1...3", "1..1000000000"])
def test_other_texts_are_no_counts(text: str) -> None:
    with pytest.raises(UsageError, match="--workers"):
        parse_counts(text, "--workers")


def test_rates_and_sizes_are_lists() -> None:
    assert parse_rates("25,1,0.5") == (0.5, 1.0, 25.0)
    assert parse_sizes("100MB,10MB") == (10_000_000, 100_000_000)
    for text in ("", "fast", "1;2"):
        with pytest.raises(UsageError, match="--links"):
            parse_rates(text)
    with pytest.raises(UsageError):
        parse_sizes("10MB,,1GB")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"workers": (0,)}, "--workers has 0"),
        ({"workers": (-1, 2)}, "--workers has -1"),
        ({"workers": (1_000_000,)}, "1000000 workers and 4 memory nodes are 1000004 machines"),
        ({"memory_nodes": (0, 1)}, "--memory-nodes has 0"),
        ({"memory_nodes": ()}, "--memory-nodes is empty"),
        ({"links_gbps": (0.0,)}, "--links has 0 Gbit/s"),
        ({"links_gbps": (-5.0,)}, "--links has -5"),
        ({"links_gbps": (float("nan"),)}, "--links has nan"),
        ({"links_gbps": (float("inf"),)}, "--links has inf"),
        ({"links_gbps": ()}, "--links is empty"),
        ({"checkpoint_bytes": 0}, "--checkpoint-size is 0 B"),
        ({"repeats": 0}, "--repeats is 0"),
    ],
)
def test_impossible_settings_are_refused_in_one_sentence(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match) as told:
        NetworkSettings(**wrong)  # type: ignore[arg-type]
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [({"sizes": ()}, "0 sizes"), ({"sizes": (0,)}, "has 0 B"), ({"repeats": 101}, "101"), ({"sizes": (1,)}, "12 kB")],
)
def test_impossible_overheads_are_refused(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        OverheadSettings(**wrong)  # type: ignore[arg-type]


def test_what_does_not_fit_into_memory_is_refused_before_anything_starts() -> None:
    settings = NetworkSettings(workers=(1, 8), checkpoint_bytes=10**9)
    settings.check_memory(10**12)
    settings.check_memory(None)
    with pytest.raises(UsageError, match=r"8 workers with checkpoints of 1 GB need about 42\.\d GB of memory"):
        settings.check_memory(16 * 10**9)
    with pytest.raises(UsageError, match="a state of 1 TB on 2 workers"):
        OverheadSettings(sizes=(10**12,)).check_memory(10**11)


def test_a_checkpoint_has_many_chunks_and_nodes_room_for_two_of_each() -> None:
    settings = NetworkSettings(checkpoint_bytes=64_000_000)
    assert settings.checkpoint_bytes / settings.block_bytes > 100
    assert settings.block_bytes % 4096 == 0
    assert settings.capacity_bytes(2) * 2 > 4 * 64_000_000 * 2
    assert NetworkSettings(checkpoint_bytes=12_000).block_bytes == 65536
    assert NetworkSettings(checkpoint_bytes=10**12).block_bytes == 4 * 2**20


def test_free_memory_is_known_here() -> None:
    found = free_memory_bytes()
    assert found is not None
    assert found > 10**8


def test_why_links_have_no_limit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert no_links_because() == "network namespaces need root"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert no_links_because() == "tc is not installed (iproute2)"
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert no_links_because() == "ip and tc are not installed (iproute2)"
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    assert no_links_because() is None
