"""Decide whether to save after a step. Input: the policy, and notices to a machine. All ranks decide the same.

What follows from the step's number alone, every rank knows. For all else (clocks, measurements, a notice to one
machine) ranks ask each other, at most every ASK_S seconds, or at every step if one takes longer. Each answer says at
which step they ask next, so that all ask at the same one.
"""

from __future__ import annotations

import logging
import os
import time

from deepvm import strict_json
from deepvm.checkpoint import ranks
from deepvm.policy import AnyOf, AtNotice, Moment, SavePolicy

log = logging.getLogger("deepvm.checkpoint")

ASK_S = 0.1
_MOST_BYTES = 2**16  # of a notice
MOST_STEPS = 10  # between two questions: steps may become slower than they were
UNTIMED_NOTICE_S = 30.0  # if a notice has no time: the least that clouds give


class SaveSchedule:
    def __init__(self, policy: SavePolicy, world_size: int, *, expects_notices: bool) -> None:
        """``expects_notices``: a notice may reach some machine, and makes all ranks save, whatever the policy."""
        self._world_size = world_size
        if expects_notices:
            policy = AnyOf(policy, AtNotice())
        parts = policy.policies if isinstance(policy, AnyOf) else (policy,)
        self._certain = [part for part in parts if part.deterministic]
        self._uncertain = [part for part in parts if not part.deterministic]
        self._slowest_s = 0.0  # of the steps since the last question
        self._steps_until_question = 1

    def due(self, now: Moment, step_s: float) -> bool:
        """True if ranks save after this step. Every rank calls it after every step, and gets the same answer."""
        due = any(part.due(now) for part in self._certain)
        if self._world_size == 1:
            return due or any(part.due(now) for part in self._uncertain)
        if not self._uncertain:
            return due
        self._slowest_s = max(self._slowest_s, step_s)
        self._steps_until_question -= 1
        if self._steps_until_question > 0:
            return due
        own = any(part.due(now) for part in self._uncertain)
        some, slowest_us = ranks.all_reduce_max(f"step({now.step})", (int(own), int(self._slowest_s * 1e6)))
        self._slowest_s = 0.0
        self._steps_until_question = min(MOST_STEPS, max(1, int(ASK_S * 1e6) // max(1, slowest_us)))
        return due or bool(some)


class Pace:
    """The times of steps, saves and notices, from which policies decide."""

    def __init__(self) -> None:
        self._started_s = self._last_saved_s = self._last_step_s = time.monotonic()
        self._last_saved_step = 0
        self._noticed_s: float | None = None
        self._restore_s: float | None = None
        self.notice_ends_s: float | None = None

    def stepped(self) -> float:
        """Return how long the step took that is finished now."""
        now_s = time.monotonic()
        seconds, self._last_step_s = now_s - self._last_step_s, now_s
        return seconds

    def saved(self, step: int) -> None:
        self._last_saved_step, self._last_saved_s = step, time.monotonic()

    def restored(self, step: int, seconds: float) -> None:
        self._restore_s = seconds
        self.saved(step)
        self._last_step_s = self._last_saved_s

    def notice(self, seconds_left: float) -> None:
        self._noticed_s = time.monotonic()
        self.notice_ends_s = self._noticed_s + seconds_left

    def moment(self, step: int, *, last_stall_s: float | None, last_save_s: float | None, under_way: bool) -> Moment:
        now_s = time.monotonic()
        return Moment(
            step=step,
            now_s=now_s - self._started_s,
            last_saved_step=self._last_saved_step,
            last_saved_s=self._last_saved_s - self._started_s,
            notice_s_left=None if self.notice_ends_s is None else max(0.0, self.notice_ends_s - now_s),
            noticed_s=None if self._noticed_s is None else self._noticed_s - self._started_s,
            save_cost_s=self._restore_s if last_stall_s is None else last_stall_s,  # as many bytes, until one is known
            save_took_s=last_save_s,
            under_way_for_s=now_s - self._last_saved_s if under_way else None,
        )


class NoticeFile:
    """A file that announces this machine's preemption: ``{"action": "terminate", "at_s": 1790000000.0}``, in seconds
    since 1970. To check it costs one stat."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.interrupts = False  # the run ends with the save that the notice asks for

    def seconds_left(self) -> float | None:
        """Return the time until the announced preemption; None if there is none, or none that is new."""
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
            version = (found.st_mtime_ns, found.st_ino, found.st_size)
            if version == self._seen:
                return None
            self._seen = version
            with open(self._path, "rb") as file:
                notice = strict_json.loads(file.read(_MOST_BYTES + 1) or b"{}", most_bytes=_MOST_BYTES)
            at_s = notice.get("at_s")
            left_s = UNTIMED_NOTICE_S if at_s is None else max(0.0, float(at_s) - time.time())
            self.interrupts = notice.get("action") == "interrupt"
            return left_s
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:  # truncated, or not a notice
            log.warning("the notice in %s cannot be read: %s", self._path, error)
            return None
