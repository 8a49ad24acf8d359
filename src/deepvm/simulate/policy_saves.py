"""A save policy, as plans and runs hold it: a policy in, save times and a rule at notices out."""

from __future__ import annotations

from dataclasses import dataclass

from deepvm.errors import UsageError
from deepvm.policy.notice import NoticePolicy
from deepvm.policy.saving import AnyOf, AtNotice, EverySeconds, Moment, SavePolicy, YoungDaly, YoungDalyByAge
from deepvm.simulate.by_age import intervals_by_age
from deepvm.simulate.saves import FixedInterval, NeverSave, SaveTimes


@dataclass(frozen=True, kw_only=True)
class PolicyTimes:
    saves: SaveTimes
    every_s: float | None  # of a fixed interval
    at_notice: NoticePolicy | None  # None if a notice changes nothing


def times_of(policy: SavePolicy, *, stall_s: float, remote_s: float, losses_per_h: float) -> PolicyTimes:
    """Return when a gang saves. ``losses_per_h`` is the hazard of a Young/Daly policy that has none.

    UsageError for policies by steps: only a run knows how long a step takes."""
    parts = policy.policies if isinstance(policy, AnyOf) else (policy,)
    told = next((part.policy for part in parts if isinstance(part, AtNotice)), None)
    timed = [part for part in parts if not isinstance(part, AtNotice)]
    stall_h, remote_h = stall_s / 3600, remote_s / 3600
    if not timed:
        return PolicyTimes(saves=NeverSave(save_h=(stall_s + remote_s) / 3600), every_s=None, at_notice=told)
    if len(timed) == 1 and isinstance(timed[0], YoungDalyByAge):
        by_age = intervals_by_age(timed[0], stall_s=stall_s, remote_s=remote_s)
        return PolicyTimes(saves=by_age, every_s=None, at_notice=told)
    every_s = min(_every_s(part, stall_s, remote_s, losses_per_h) for part in timed)
    saves = FixedInterval(interval_h=every_s / 3600, stall_h=stall_h, remote_h=remote_h)
    return PolicyTimes(saves=saves, every_s=every_s, at_notice=told)


def _every_s(policy: SavePolicy, stall_s: float, remote_s: float, losses_per_h: float) -> float:
    if isinstance(policy, EverySeconds):
        return policy.seconds
    if isinstance(policy, YoungDaly):
        moment = Moment(
            step=1, now_s=0.0, save_cost_s=stall_s, save_took_s=stall_s + remote_s, hazard_per_s=losses_per_h / 3600
        )
        return policy.interval_s(moment)
    raise UsageError(f"the save policy {str(policy)!r} cannot be simulated: give one by time, such as every 60s")
