"""DCP's checkpoint_id as a step."""

from __future__ import annotations

import os
import re

from deepvm.errors import UsageError

_STEP = re.compile(r"(\d+)/*\Z")


def tells_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    return _STEP.search(os.fspath(checkpoint_id)) is not None


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    match = _STEP.search(os.fspath(checkpoint_id))
    if match is None:
        raise UsageError(f"checkpoint_id {os.fspath(checkpoint_id)!r} tells no step: end it with one, like step-100")
    return int(match[1])
