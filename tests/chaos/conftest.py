"""The tests here use the processes of the checkpoint and runtime tests."""

from __future__ import annotations

import sys
from pathlib import Path

for _room in ("checkpoint", "runtime"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _room))
