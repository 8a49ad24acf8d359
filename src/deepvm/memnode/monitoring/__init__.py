"""A node's logs, counters and metrics."""
