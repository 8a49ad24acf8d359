"""Tests of deepvm simulate and deepvm backtest."""
