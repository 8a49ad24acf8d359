"""Data loaders and samplers that resume in the middle of an epoch."""
