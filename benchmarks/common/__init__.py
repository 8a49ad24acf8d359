"""What several benchmarks use: states to save, limits of the machine, environments of peers, a scratch folder."""
