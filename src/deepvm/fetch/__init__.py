"""Fetching a checkpoint beside the trainer: ``deepvm-fetch`` fills a segment of shared memory while Python still
imports, and the trainer takes the bytes from there."""
