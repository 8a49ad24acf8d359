"""Where the machines of a run meet: groups, progress, connections."""
