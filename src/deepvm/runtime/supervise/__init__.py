"""Start a run, watch it, replace what is lost, end it: here or in a cloud."""
