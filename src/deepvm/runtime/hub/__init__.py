"""Coordinates a run's machines: connections in, groups and events out."""
