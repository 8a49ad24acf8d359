"""Decisions as small pure values: when to save, what to keep, what to do at a notice or a loss, where to train.
Checkpointer, nodes, hub, supervisor and simulator use them."""

from deepvm.policy.loss import AfterLoss, parse_after_loss
from deepvm.policy.notice import NoticeDecision, NoticePolicy, at_notice
from deepvm.policy.policy_text import parse_policy
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
    YoungDalyByAge,
    daly_interval_s,
)

__all__ = [
    "AfterLoss",
    "AllOf",
    "AnyOf",
    "AtNotice",
    "EverySeconds",
    "EverySteps",
    "Moment",
    "NoticeDecision",
    "NoticePolicy",
    "Retention",
    "SavePolicy",
    "YoungDaly",
    "YoungDalyByAge",
    "at_notice",
    "daly_interval_s",
    "parse_after_loss",
    "parse_policy",
]
