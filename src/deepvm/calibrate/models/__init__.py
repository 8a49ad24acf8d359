"""Names of well-known models in, torch modules with random weights, or without any on the meta device, out."""
