"""A save's handle: its states in their order, and what waiting for one of them means."""

from __future__ import annotations

import threading
import time

import pytest

from deepvm.checkpoint.handle import SaveHandle
from deepvm.errors import CheckpointError, UsageError


def test_states_only_advance_and_the_end_is_the_end() -> None:
    handle = SaveHandle(7)
    assert (handle.state, handle.attempt, repr(handle)) == ("taken", 0, "SaveHandle(step=7, state='taken')")
    handle.advance("remote")
    for earlier in ("staged", "taken", "remote"):
        handle.advance(earlier, "no")  # type: ignore[arg-type]
    assert (handle.state, handle.reason) == ("remote", None)
    handle.advance("durable", "on the disk")
    handle.advance("failed")
    assert (handle.state, handle.reason) == ("failed", "on the disk")
    handle.advance("durable")
    assert handle.state == "failed"
    assert repr(handle) == "SaveHandle(step=7, state='failed', on the disk)"


def test_a_state_that_was_reached_or_passed_is_not_waited_for() -> None:
    handle = SaveHandle(7)
    handle.advance("remote")
    for state in ("taken", "staged", "remote"):
        handle.wait(state, 0.0)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"step 7 is remote and did not become durable in 0 s"):
        handle.wait("durable", 0.0)
    with pytest.raises(UsageError, match="cannot wait for a save to be 'skipped': wait for one of taken, staged"):
        handle.wait("skipped")


@pytest.mark.parametrize("end", ["skipped", "failed"])
def test_a_save_that_ended_is_an_error_with_its_reason(end: str) -> None:
    handle = SaveHandle(7)
    threading.Timer(0.02, handle.advance, (end, "no room")).start()
    with pytest.raises(CheckpointError, match=f"step 7 was {end}: no room"):
        handle.wait("remote", 20)


def test_the_wait_for_the_end_lasts_until_the_machine_goes_or_the_save_fails() -> None:
    handle = SaveHandle(7)
    handle.wait_for_the_end(None)
    began = time.monotonic()
    handle.wait_for_the_end(began + 0.05)
    assert time.monotonic() - began >= 0.05
    threading.Timer(0.02, handle.advance, ("failed", "why")).start()
    handle.wait_for_the_end(began + 60)
    assert time.monotonic() - began < 50
