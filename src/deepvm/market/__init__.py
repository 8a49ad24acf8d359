"""Spot markets: traces and price histories in; capacity, prices and hazards on one clock out. For plan and simulate."""

from deepvm.market.builtin import History, builtin_history, builtin_market, history_of
from deepvm.market.history import PriceAt, PriceHistory
from deepvm.market.market import Market, market_of
from deepvm.market.trace import Trace, TraceKind, load_trace, load_traces

__all__ = [
    "History",
    "Market",
    "PriceAt",
    "PriceHistory",
    "Trace",
    "TraceKind",
    "builtin_history",
    "builtin_market",
    "history_of",
    "load_trace",
    "load_traces",
    "market_of",
]
