"""The client of memory nodes: ``memory://`` as a store, and what its connections send."""
