"""A job, a strategy and a market in; time, cost and lost work out. Pure: no clock, no file, no random numbers."""
