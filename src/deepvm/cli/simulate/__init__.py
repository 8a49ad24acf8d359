"""``deepvm simulate`` and ``deepvm backtest``: words in, the simulator's answers out as tables, figures and JSON."""
