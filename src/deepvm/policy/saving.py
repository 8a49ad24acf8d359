"""When to save: a policy and one moment of training in, True or False out. Pure: the save schedule passes the time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

from deepvm.errors import UsageError
from deepvm.policy.notice import NoticeDecision, NoticePolicy, at_notice, expected_save_s
from deepvm.units import parse_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is known after a training step."""

    step: int
    now_s: float  # since the run began or was restored, which counts as the first save
    last_saved_step: int | None = None
    last_saved_s: float | None = None
    notice_s_left: float | None = None  # seconds until this machine is preempted, after a notice
    noticed_s: float | None = None  # when the notice arrived
    save_cost_s: float | None = None  # training time that one save takes, as measured
    restore_cost_s: float | None = None
    hazard_per_s: float | None = None  # preemptions that stop the run, per second
    save_took_s: float | None = None  # from the start of a save until it is safe elsewhere, as measured
    under_way_for_s: float | None = None  # since the start of a save that is not safe yet; it counts as the last one
    state_bytes: int | None = None  # that a save transfers
    bytes_per_s: float | None = None  # at which they become safe, as measured

    @property
    def unsaved_steps(self) -> int:
        return self.step - (self.last_saved_step or 0)

    @property
    def unsaved_s(self) -> float:
        return self.now_s - (self.last_saved_s or 0.0)

    @property
    def save_s(self) -> float | None:
        """Seconds until a save that starts now is safe elsewhere; its training time is the lower bound."""
        measured = self.save_cost_s if self.save_took_s is None else self.save_took_s
        return expected_save_s(state_bytes=self.state_bytes, bytes_per_s=self.bytes_per_s, took_s=measured)


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
        return f"every {self.seconds!r}s"


@dataclass(frozen=True, kw_only=True, slots=True)
class YoungDaly(_Composable):
    """Save at the interval that loses least time to saves and to repeated work after a preemption."""

    hazard_per_s: float | None = None  # overrides the measured one
    fallback_s: float = 600.0  # until a save is measured and a hazard is known
    least_s: float = 1.0
    most_s: float = 3600.0  # even in a quiet market

    def __post_init__(self) -> None:
        if self.hazard_per_s is not None and not (math.isfinite(self.hazard_per_s) and self.hazard_per_s >= 0):
            raise UsageError(f"hazard_per_s is {self.hazard_per_s}: it must be finite and not negative")
        if not 0 < self.least_s <= self.most_s < math.inf or not self.fallback_s > 0:
            raise UsageError(
                f"least_s is {self.least_s}, most_s {self.most_s}, fallback_s {self.fallback_s}: "
                "all must be above 0, and least_s at most most_s"
            )

    def interval_s(self, now: Moment) -> float:
        hazard = self.hazard_per_s if self.hazard_per_s is not None else now.hazard_per_s
        if hazard is None or now.save_cost_s is None:
            wanted = self.fallback_s
        else:
            wanted = daly_interval_s(now.save_cost_s, hazard)
        return min(max(wanted, self.least_s), self.most_s)

    def due(self, now: Moment) -> bool:
        return now.unsaved_steps > 0 and now.unsaved_s >= self.interval_s(now)

    def __str__(self) -> str:
        return "young-daly"


@dataclass(frozen=True, slots=True)
class AtNotice(_Composable):
    """Save at a preemption notice: at once, and again until the end, as long as a save can finish in time."""

    again_after_s: float = 15.0  # a younger save suffices, unless less time than this is left
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
        return "at notice"


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
        return " or ".join(map(str, self.policies))


class AllOf(_Combination):
    """Save when all policies are due."""

    __slots__ = ()

    def due(self, now: Moment) -> bool:
        return all(policy.due(now) for policy in self.policies)

    def __str__(self) -> str:
        return " and ".join(f"({p})" if isinstance(p, AnyOf) else str(p) for p in self.policies)


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


_STEPS = re.compile(r"(?:every\s+)?(\d+)\s*steps?\Z|every\s+steps?\Z")
_SECONDS = re.compile(r"(?:every\s+)?([\d.]+(?:e[-+]?\d+)?\s*[a-z]*)\Z")
_LIKE = "every 100 steps, every 60s, 100 steps or 60s, young-daly, at notice"


def parse_policy(text: str) -> SavePolicy:
    """Parse ``every 100 steps``, ``60s``, ``young-daly``, ``at notice``, joined by ``or`` and closer by ``and``."""
    words = " ".join(text.lower().replace("|", " or ").replace("&", " and ").split())
    choices = [[_term(term, text) for term in choice.split(" and ")] for choice in words.split(" or ")]
    parts: list[SavePolicy] = [terms[0] if len(terms) == 1 else AllOf(*terms) for terms in choices]
    return parts[0] if len(parts) == 1 else AnyOf(*parts)


def _term(term: str, text: str) -> SavePolicy:
    term = term.strip()
    if term in ("young-daly", "young/daly", "youngdaly", "daly"):
        return YoungDaly()
    if term in ("at notice", "at-notice", "notice", "at a notice"):
        return AtNotice()
    if found := _STEPS.match(term):
        return EverySteps(int(found[1] or 1))
    if found := _SECONDS.match(term):
        try:
            return EverySeconds(parse_seconds(found[1]))
        except UsageError:
            pass
    raise UsageError(f"{text!r} is not a valid save policy ({term!r} is unknown): write it like {_LIKE}")
