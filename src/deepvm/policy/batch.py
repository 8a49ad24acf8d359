"""Names of the batch policies: what stays constant if the number of ranks differs from the plan."""

from __future__ import annotations

KEEP_GLOBAL = "keep-global-batch"  # the samples of a step
KEEP_LOCAL = "keep-local-batch"  # the samples of each rank
BATCH_POLICIES = (KEEP_GLOBAL, KEEP_LOCAL)
