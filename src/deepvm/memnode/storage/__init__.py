"""What a node holds in memory: blocks, runs, uploads, committed checkpoints. Used by serving/ and writeback/."""
