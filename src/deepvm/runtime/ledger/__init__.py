"""What happened in a run and what it cost."""
