"""deepvm."""
