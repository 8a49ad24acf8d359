"""The process of each machine: connects to the hub, runs the workers, and forwards their events."""
