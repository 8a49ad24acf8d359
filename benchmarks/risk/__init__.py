"""Plans under a spot market: what they save on random markets, how well they predict, and how long they take."""
