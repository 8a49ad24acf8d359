"""Spot markets: traces and price histories in; capacity, prices and hazards on one clock out. For plan and simulate."""
