"""The names of a checkpoint's two files, in directories and buckets: steps in, names out, and back."""

from __future__ import annotations

import re

from deepvm.store.base import MOST_STEP

_STEM = re.compile(r"step-([0-9]{12,19})\Z")
DATA, MANIFEST = ".safetensors", ".json"


def stem(step: int) -> str:
    """Return a file name without its suffix; names sort like their steps."""
    return f"step-{step:012d}"


def step_of(name: str, suffix: str) -> int | None:
    """Return the step of a file name; None if it is not one of ours."""
    if not name.endswith(suffix):
        return None
    match = _STEM.match(name[: -len(suffix)])
    step = int(match[1]) if match else -1
    return step if 0 <= step <= MOST_STEP and name == stem(step) + suffix else None


def whole_steps(names: set[str]) -> list[int]:
    """Return the steps with both files: a manifest is written last, but its bytes may have been lost since."""
    found = (step_of(name, MANIFEST) for name in names)
    return sorted(step for step in found if step is not None and stem(step) + DATA in names)
