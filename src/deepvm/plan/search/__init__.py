"""The space of all clusters: machines rated into a board, boards into prices, and the search for mixed types."""
