"""``deepvm-fetch``: a run's stores -> a shared memory segment, while Python imports. The trainer restores from it."""
