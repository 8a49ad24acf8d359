"""DCP's ``checkpoint_id`` -> the step that ``reader`` loads and ``writer`` saves."""

from __future__ import annotations

import os
import re

from deepvm.errors import UsageError

_STEP = re.compile(r"(\d+)/*\Z")


class StepFromId:
    """What DCP's readers and writers share: both take their step from a checkpoint_id that ends with a number."""

    _wanted_step: int | None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is None:
            return
        match = _STEP.search(os.fspath(checkpoint_id))
        if match is None:
            raise UsageError(f"checkpoint_id {os.fspath(checkpoint_id)!r} has no step: end it with one, like step-100")
        self._wanted_step = int(match[1])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _STEP.search(os.fspath(checkpoint_id)) is not None
