"""Buckets as a store: ``s3://``, ``gs://``, ``az://``."""
