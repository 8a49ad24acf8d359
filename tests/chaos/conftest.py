"""The tests here use the processes of the checkpoint tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
