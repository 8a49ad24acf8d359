"""How a checkpointer ends: the last save, and the interpreter's exit."""
