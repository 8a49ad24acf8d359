"""A checkpoint from a store into the trainer's objects, at once or on demand."""
