"""Bandwidths and checkpoints in, memory nodes that are needed and times of transmission out. For plan, calibrate."""
