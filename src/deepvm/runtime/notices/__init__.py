"""Where machines learn that they will be taken away."""
