"""From SIGKILL of a machine to the next finished step."""
