"""What trainers, memory nodes and machines agree on: addresses, sockets, credentials, frames, chunk placement."""
