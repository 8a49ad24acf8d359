"""Training with saves beside training without."""
