"""Plans: the paper's sweep, and a generated catalogue of 54,000 rows."""
