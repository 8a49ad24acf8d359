"""A job, a strategy and a market in; time, cost and lost work out. Pure: no clock, no global random numbers."""

from deepvm.policy.fallback import SafetyNet, UniformProgress
from deepvm.simulate.backtesting.one_market import backtest
from deepvm.simulate.backtesting.result import Backtest, Backtests
from deepvm.simulate.backtesting.several_markets import backtests, simulate
from deepvm.simulate.choice import Promise, choose
from deepvm.simulate.job import GangJob
from deepvm.simulate.notices import Notices
from deepvm.simulate.oracle import lower_bound_usd
from deepvm.simulate.outcome import Outcomes
from deepvm.simulate.replay import replay
from deepvm.simulate.risk import Risk, risk_of, risks_of
from deepvm.simulate.saves import FixedInterval, IntervalsByAge, NeverSave
from deepvm.simulate.strategies import Maker, Rates
from deepvm.simulate.strategy import Strategy

__all__ = [
    "Backtest",
    "Backtests",
    "FixedInterval",
    "GangJob",
    "IntervalsByAge",
    "Maker",
    "NeverSave",
    "Notices",
    "Outcomes",
    "Promise",
    "Rates",
    "Risk",
    "SafetyNet",
    "Strategy",
    "UniformProgress",
    "backtest",
    "backtests",
    "choose",
    "lower_bound_usd",
    "replay",
    "risk_of",
    "risks_of",
    "simulate",
]
