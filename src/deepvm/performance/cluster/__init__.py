"""What a cluster adds to one GPU: links and a limit of the batch in, curves over machines out. ``curves`` uses it."""
