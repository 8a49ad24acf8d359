"""When to save: a policy and one moment of training in, True or False out. Pure: the save schedule passes the time.

``policy_text`` parses policies: ``str()`` of a policy is a text that it parses to the same policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from deepvm.errors import UsageError
from deepvm.policy.notice import NoticeDecision, NoticePolicy, at_notice


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is known after a training step."""

    step: int
    now_s: float  # since the run began or was restored, which counts as the first save
    last_saved_step: int | None = None
    last_saved_s: float | None = None
    notice_s_left: float | None = None  # seconds until this machine is preempted, after a notice
    noticed_s: float | None = None  # when the notice arrived
    save_cost_s: float | None = None  # training time that one save takes: how long the trainer waited for the last one
    hazard_per_s: float | None = None  # preemptions that stop the run, per second; the checkpointer knows none
    save_took_s: float | None = None  # from the start of a save until it is safe elsewhere, as measured
    under_way_for_s: float | None = None  # since the start of a save that is not safe yet; it counts as the last one

    @property
    def unsaved_steps(self) -> int:
        return self.step - (self.last_saved_step or 0)

    @property
    def unsaved_s(self) -> float:
        return self.now_s - (self.last_saved_s or 0.0)

    @property
    def save_s(self) -> float | None:
        """Seconds until a save that starts now is safe elsewhere; its training time is the lower bound."""
        return self.save_cost_s if self.save_took_s is None else self.save_took_s


class SavePolicy(Protocol):
    @property
    def deterministic(self) -> bool:
        """True if all ranks decide alike from the step alone; if not, one decides for all."""
        ...

    def due(self, now: Moment) -> bool: ...

    def __or__(self, other: SavePolicy) -> AnyOf: ...

    def __and__(self, other: SavePolicy) -> AllOf: ...


class _Composable:
    __slots__ = ()

    @property
    def deterministic(self) -> bool:
        return False  # clocks, measurements and notices differ between ranks

    def __or__(self, other: SavePolicy) -> AnyOf:
        return AnyOf(self, other)  # type: ignore[arg-type]

    def __and__(self, other: SavePolicy) -> AllOf:
        return AllOf(self, other)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class EverySteps(_Composable):
    """Save at every n-th step."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"cannot save every {self.steps} steps: the number must be at least 1")

    @property
    def deterministic(self) -> bool:
        return True

    def due(self, now: Moment) -> bool:
        return now.step > 0 and now.step % self.steps == 0

    def __str__(self) -> str:
        return f"every {self.steps} steps"


@dataclass(frozen=True, slots=True)
class EverySeconds(_Composable):
    """Save when this many seconds have passed since the last save."""

    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UsageError(f"cannot save every {self.seconds} seconds: the number must be above 0")

    def due(self, now: Moment) -> bool:
        return now.unsaved_steps > 0 and now.unsaved_s >= self.seconds

    def __str__(self) -> str:
        return f"every {_seconds_text(self.seconds)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class YoungDaly(_Composable):
    """Save at the interval that loses least time to saves and to repeated work after a preemption.

    Without a hazard, from here or from the moment, it saves every ``fallback_s``.
    """

    hazard_per_s: float | None = None  # overrides the moment's
    fallback_s: float = 600.0  # until a save is measured and a hazard is known
    least_s: float = 1.0
    most_s: float = 3600.0  # even in a quiet market

    def __post_init__(self) -> None:
        if self.hazard_per_s is not None and not (math.isfinite(self.hazard_per_s) and self.hazard_per_s >= 0):
            raise UsageError(f"hazard_per_s is {self.hazard_per_s}: it must be finite and not negative")
        if not 0 < self.least_s <= self.most_s < math.inf or not 0 < self.fallback_s < math.inf:
            raise UsageError(
                f"least_s is {self.least_s}, most_s {self.most_s}, fallback_s {self.fallback_s}: "
                "all must be finite and above 0, and least_s at most most_s"
            )

    def interval_s(self, now: Moment) -> float:
        hazard = self.hazard_per_s if self.hazard_per_s is not None else now.hazard_per_s
        if hazard is None or now.save_cost_s is None:
            wanted = self.fallback_s
        else:
            wanted = daly_interval_s(now.save_cost_s, hazard)
        return _for_one_save(min(max(wanted, self.least_s), self.most_s), now)

    def due(self, now: Moment) -> bool:
        return now.unsaved_steps > 0 and now.unsaved_s >= self.interval_s(now)

    def __str__(self) -> str:
        plain, options = YoungDaly(), {}
        if self.hazard_per_s is not None:
            options["hazard"] = f"{float(self.hazard_per_s)!r}/s"
        if self.fallback_s != plain.fallback_s:
            options["fallback"] = _seconds_text(self.fallback_s)
        if self.least_s != plain.least_s:
            options["least"] = _seconds_text(self.least_s)
        if self.most_s != plain.most_s:
            options["most"] = _seconds_text(self.most_s)
        return "young-daly" + _text_of(options)


@dataclass(frozen=True, kw_only=True, slots=True)
class YoungDalyByAge(_Composable):
    """Save often while a spell of training is young, and less often as it grows old: most spells end early.

    A spell is short with probability ``short_share``; short and long ones last ``short_s`` and ``long_s`` on average.
    Its age counts from the start or the restore of the run.
    """

    short_share: float
    short_s: float
    long_s: float
    fallback_s: float = 600.0  # until a save is measured
    least_s: float = 1.0
    most_s: float = 3600.0

    def __post_init__(self) -> None:
        if not (0 <= self.short_share <= 1 and 0 < self.short_s <= self.long_s < math.inf):
            raise UsageError(
                f"short_share is {self.short_share}, short_s {self.short_s}, long_s {self.long_s}: "
                "the share must be from 0 to 1, the times above 0, the short one first"
            )
        if not 0 < self.least_s <= self.most_s < math.inf or not 0 < self.fallback_s < math.inf:
            raise UsageError(
                f"least_s is {self.least_s}, most_s {self.most_s}, fallback_s {self.fallback_s}: "
                "all must be above 0, and least_s at most most_s"
            )

    def hazard_per_s(self, age_s: float) -> float:
        """Return the rate at which spells of this age end."""
        age_s = max(0.0, age_s)
        faded = math.exp(-age_s * (1 / self.short_s - 1 / self.long_s))  # of short ones against long ones
        short, long = self.short_share * faded, 1 - self.short_share
        if short + long <= 0:
            return 1 / self.short_s
        return (short / self.short_s + long / self.long_s) / (short + long)

    def after_s(self, age_s: float, save_cost_s: float) -> float:
        """Return the training time from a save at this age to the next: Daly's, with the hazard halfway."""
        wanted = daly_interval_s(save_cost_s, self.hazard_per_s(age_s))
        for _ in range(_HALFWAY_ROUNDS):
            wanted = daly_interval_s(save_cost_s, self.hazard_per_s(age_s + wanted / 2))
        return min(max(wanted, self.least_s), self.most_s)

    def interval_s(self, now: Moment) -> float:
        if now.save_cost_s is None:
            return min(max(self.fallback_s, self.least_s), self.most_s)
        return _for_one_save(self.after_s(now.last_saved_s or 0.0, now.save_cost_s), now)

    def due(self, now: Moment) -> bool:
        return now.unsaved_steps > 0 and now.unsaved_s >= self.interval_s(now)

    def __str__(self) -> str:
        options = {
            "share": repr(float(self.short_share)),
            "short": _seconds_text(self.short_s),
            "long": _seconds_text(self.long_s),
        }
        for name, usual in (("fallback", 600.0), ("least", 1.0), ("most", 3600.0)):
            if (seconds := getattr(self, f"{name}_s")) != usual:
                options[name] = _seconds_text(seconds)
        return "young-daly by age" + _text_of(options)


@dataclass(frozen=True, slots=True)
class AtNotice(_Composable):
    """Save at a preemption notice: at once, and again until the end, as long as a save can finish in time."""

    again_after_s: float = (
        15.0  # a younger save suffices, unless less time than this is left; inf: until the last chance
    )
    policy: NoticePolicy = NoticePolicy()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not self.again_after_s > 0:
            raise UsageError(f"again_after_s is {self.again_after_s}: it must be above 0")

    def decide(self, now: Moment) -> NoticeDecision:
        return at_notice(
            seconds_left=now.notice_s_left,
            unsaved_steps=now.unsaved_steps,
            save_s=now.save_s,
            under_way_for_s=now.under_way_for_s,
            policy=self.policy,
        )

    def due(self, now: Moment) -> bool:
        left_s = now.notice_s_left
        if left_s is None or left_s <= 0 or now.under_way_for_s is not None:  # decided again at the next step
            return False
        if self.decide(now).choice != "save":
            return False
        if now.noticed_s is not None and (now.last_saved_s or 0.0) < now.noticed_s:
            return True  # no save has started since
        last_chance_s = left_s if now.save_s is None else self.policy.spare_s(left_s, now.save_s)
        return now.unsaved_s >= min(self.again_after_s, last_chance_s)

    def __str__(self) -> str:
        plain, options = AtNotice(), {}
        if self.again_after_s != plain.again_after_s:
            options["again"] = _seconds_text(self.again_after_s)
        if self.policy.margin != plain.policy.margin:
            options["margin"] = repr(float(self.policy.margin))
        if self.policy.keep_s != plain.policy.keep_s:
            options["keep"] = _seconds_text(self.policy.keep_s)
        return "at notice" + _text_of(options)


@dataclass(frozen=True, slots=True, init=False)
class _Combination(_Composable):
    """Several policies as one, flattened: (a | b) | c is a | b | c."""

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: SavePolicy) -> None:
        kind = type(self)
        flat = [one for policy in policies for one in (policy.policies if isinstance(policy, kind) else (policy,))]
        if not flat:
            raise UsageError(f"{kind.__name__} of no policies would never save: pass at least one")
        object.__setattr__(self, "policies", tuple(flat))

    @property
    def deterministic(self) -> bool:
        return all(policy.deterministic for policy in self.policies)


class AnyOf(_Combination):
    """Save when at least one policy is due."""

    __slots__ = ()

    def due(self, now: Moment) -> bool:
        return any(policy.due(now) for policy in self.policies)

    def __str__(self) -> str:
        return " or ".join(map(str, self.policies)) if len(self.policies) > 1 else f"any of ({self.policies[0]})"


class AllOf(_Combination):
    """Save when all policies are due."""

    __slots__ = ()

    def due(self, now: Moment) -> bool:
        return all(policy.due(now) for policy in self.policies)

    def __str__(self) -> str:
        parts = [f"({policy})" if isinstance(policy, AnyOf) else str(policy) for policy in self.policies]
        return " and ".join(parts) if len(parts) > 1 else f"all of ({self.policies[0]})"


def daly_interval_s(save_cost_s: float, hazard_per_s: float) -> float:
    """Return the training time between two saves that loses least (Daly 2006, the higher-order estimate).

    For a cost that is small against the mean time between preemptions this is Young's sqrt(2 × cost / hazard).
    """
    if save_cost_s < 0 or hazard_per_s < 0:
        raise UsageError(f"save_cost_s is {save_cost_s}, hazard_per_s {hazard_per_s}: neither may be negative")
    mean_s = 1 / hazard_per_s if hazard_per_s > 0 else math.inf
    if math.isinf(mean_s) or save_cost_s >= 2 * mean_s:
        return mean_s
    ratio = save_cost_s / (2 * mean_s)
    return math.sqrt(2 * save_cost_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_cost_s


def _for_one_save(interval_s: float, now: Moment) -> float:
    """Return an interval in which one save becomes safe: the next one would be skipped until then."""
    return max(interval_s, now.save_took_s or 0.0)


_HALFWAY_ROUNDS = 4  # each brings the interval a factor of ten closer


def _text_of(options: dict[str, str]) -> str:
    """Return the part of a policy's text that differs from its default: ``:most=60.0s,least=2.0s``."""
    return "".join(f"{',' if number else ':'}{name}={value}" for number, (name, value) in enumerate(options.items()))


def _seconds_text(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{repr(float(seconds)).removesuffix('.0')}s"
