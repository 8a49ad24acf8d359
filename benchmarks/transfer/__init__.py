"""The bytes of a checkpoint on their way into a node; several limited connections."""
