"""A checkpoint in a store -> the trainer's objects, at once or lazily. ``checkpoint.restorer`` calls it."""
