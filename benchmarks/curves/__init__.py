"""Saves and restores by bytes, tensors, ranks, checkpoints kept and runs on a node."""
