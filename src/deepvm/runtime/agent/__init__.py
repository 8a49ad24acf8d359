"""What runs on every machine of a run."""
