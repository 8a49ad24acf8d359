"""A snapshot into a store until it is committed and durable."""
