"""`make mutate`: put small faults into a copy of the sources and count those that no test notices."""
