"""The ``deepvm run`` command: options, display, report."""
