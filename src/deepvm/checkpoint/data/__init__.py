"""Datasets -> loaders and samplers that resume in the middle of an epoch, with any number of ranks."""
