"""Committed checkpoints from memory to the spill directory, the durable store and back after a restart."""
