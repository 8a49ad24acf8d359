"""A run's pace and the market in; its gang in another place, or on demand, out. ``supervise`` carries it out."""
