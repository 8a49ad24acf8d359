"""One call of a checkpointer at a time, outside the modes of torch: another thread's call waits for its turn. A nested
call, as a signal handler makes it, can be recognised."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from deepvm.checkpoint.torch_modes import without_ambient_modes
from deepvm.errors import CheckpointError

TURN_S = 600.0  # no call takes longer, unless another rank keeps it waiting
NESTED = "it was called within another call of this checkpointer, as from a signal handler: call it between steps"

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


class Turns:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # of nested calls, in the thread whose turn it is

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=TURN_S):
            raise CheckpointError(
                f"another thread has been in a call of this checkpointer for {TURN_S:g} s: wait for it"
            )
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()

    @property
    def nested(self) -> bool:
        """True in a call that was made within another one."""
        return self._depth > 1


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method to run in its turn."""

    @functools.wraps(method)
    def run(self: Any, /, *arguments: P.args, **named: P.kwargs) -> T:
        with self._turns, without_ambient_modes():
            return method(self, *arguments, **named)

    return run
