"""Names of the environment variables that ``deepvm run``, other launchers and users set for a trainer."""

from __future__ import annotations

STORE = "DEEPVM_STORE"  # URLs with spaces between them, in order of nearness
RUN = "DEEPVM_RUN"
POLICY = "DEEPVM_POLICY"
TOKEN, RUN_KEY = "DEEPVM_TOKEN", "DEEPVM_RUN_KEY"
EVENTS = "DEEPVM_EVENTS"  # a file to which a trainer's checkpointer appends, a line for each event
NOTICE_FILE = "DEEPVM_NOTICE_FILE"
BATCH = "DEEPVM_BATCH"
PLANNED_WORLD_SIZE = "DEEPVM_PLANNED_WORLD_SIZE"
