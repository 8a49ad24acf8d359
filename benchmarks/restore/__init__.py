"""From a lost worker to its next loss: files, nodes, on demand, templates, overlapped starts."""
