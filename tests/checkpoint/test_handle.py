"""A save's handle: its states in their order, and what waiting for one of them means."""

from __future__ import annotations

import threading
import time

import pytest

from deepvm.checkpoint.handle import SaveHandle, Status
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


def test_a_new_save_has_moved_nothing_and_a_new_checkpointer_has_saved_nothing() -> None:
    began = time.perf_counter()
    found = vars(SaveHandle(7, 2))
    assert began <= found.pop("began_s") <= time.perf_counter()
    assert found == {
        "step": 7, "attempt": 2, "stall_s": 0.0, "size_bytes": 0, "bytes_in_place": 0, "bytes_sent": 0, "bytes_kept": 0,
        "reason": None, "state": "taken",
    }  # fmt: skip
    counted = {name: value for name, value in vars(Status()).items() if value is not None}
    assert counted == {
        "taken": 0, "remote": 0, "durable": 0, "skipped": 0, "failed": 0, "stall_s": 0.0, "bytes_sent": 0,
        "bytes_kept": 0, "staging_bytes": 0, "nodes_down": (), "drift": (),
    }  # fmt: skip


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
