"""Markets and a job in; what every strategy would have paid, for many starts, out. ``deepvm.simulate`` exports it."""
