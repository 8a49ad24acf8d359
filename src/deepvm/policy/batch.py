"""What becomes of a batch when there are more ranks, or fewer, than were planned."""

from __future__ import annotations

KEEP_GLOBAL = "keep-global-batch"  # a step has as many samples as ever
KEEP_LOCAL = "keep-local-batch"  # each rank takes as many as ever
BATCH_POLICIES = (KEEP_GLOBAL, KEEP_LOCAL)
