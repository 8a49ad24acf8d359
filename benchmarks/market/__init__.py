"""Spot markets: hazard models and intervals by age, on any folder of traces."""
