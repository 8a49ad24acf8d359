"""A plan in, a finished run and its report out: start, watch, replace and end machines, on this host or in a cloud."""
