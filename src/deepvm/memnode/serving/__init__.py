"""One client's connection to a node: bytes in, checked requests, answers out. Uses storage/."""
