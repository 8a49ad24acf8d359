"""What a node tells of itself: events as JSON lines, and totals since its start."""

from __future__ import annotations

import io
import json

import pytest

from deepvm.memnode.monitoring.counters import Counters
from deepvm.memnode.monitoring.log import Log


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_every_event_is_a_line_with_its_level_and_details(level: str) -> None:
    stream = io.StringIO()
    getattr(Log(stream), level)("committed", step=7, path=io)
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {"level": level, "event": "committed", "step": 7, "path": str(io)}


def test_a_log_whose_reader_is_gone_is_silent_from_then_on() -> None:
    stream = io.StringIO()
    log = Log(stream)
    stream.close()
    log.info("first")
    log.info("second")


def test_counters_begin_at_zero_and_add_up() -> None:
    counters = Counters()
    assert set(counters.as_dict().values()) == {0}
    counters.add(saves=2, bytes_in=10)
    counters.add(saves=1)
    assert {name: count for name, count in counters.as_dict().items() if count} == {"bytes_in": 10, "saves": 3}
