"""Decisions as small values: when to save, what to keep, what to do at a notice. Simulation and runtime share them."""

from deepvm.policy.notice import EmergencyDecision, at_notice
from deepvm.policy.retention import Retention
from deepvm.policy.saving import (
    AllOf,
    AnyOf,
    AtNotice,
    EverySeconds,
    EverySteps,
    Moment,
    SavePolicy,
    YoungDaly,
    daly_interval_s,
    parse_policy,
)

__all__ = [
    "AllOf",
    "AnyOf",
    "AtNotice",
    "EmergencyDecision",
    "EverySeconds",
    "EverySteps",
    "Moment",
    "Retention",
    "SavePolicy",
    "YoungDaly",
    "at_notice",
    "daly_interval_s",
    "parse_policy",
]
