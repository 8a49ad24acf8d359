"""When to save: small values that decide from one moment, and compose. Pure: time comes in as an argument."""

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
    now_s: float  # since the run began or was restored, which counts as a save where there was none since
    last_saved_step: int | None = None
    last_saved_s: float | None = None
    notice_s_left: float | None = None  # seconds until this machine is taken, if that was announced
    noticed_s: float | None = None  # when that was heard
    save_cost_s: float | None = None  # training time that one save takes, as measured
    restore_cost_s: float | None = None
    hazard_per_s: float | None = None  # preemptions that stop the run, per second
    save_took_s: float | None = None  # from the beginning of a save until it is safe elsewhere, as measured
    under_way_for_s: float | None = None  # since a save was begun that is not safe yet; it counts as the last one
    state_bytes: int | None = None  # that a save has to move
    bytes_per_s: float | None = None  # at which they become safe, as measured

    @property
    def unsaved_steps(self) -> int:
        return self.step - (self.last_saved_step or 0)

    @property
    def unsaved_s(self) -> float:
        return self.now_s - (self.last_saved_s or 0.0)

    @property
    def save_s(self) -> float | None:
        """Until a save that begins now is safe elsewhere; the training time that it takes is the least it can be."""
        measured = self.save_cost_s if self.save_took_s is None else self.save_took_s
        return expected_save_s(state_bytes=self.state_bytes, bytes_per_s=self.bytes_per_s, took_s=measured)


class SavePolicy(Protocol):
    @property
    def deterministic(self) -> bool:
        """Whether all ranks decide alike from the step alone; if not, one decides for all."""
        ...

    def due(self, now: Moment) -> bool: ...

    def __or__(self, other: SavePolicy) -> AnyOf: ...

    def __and__(self, other: SavePolicy) -> AllOf: ...


class _Composable:
    __slots__ = ()

    @property
    def deterministic(self) -> bool:
        return False  # whatever looks at clocks, measurements or notices, which differ between ranks

    def __or__(self, other: SavePolicy) -> AnyOf:
        return AnyOf(self, other)  # type: ignore[arg-type]

    def __and__(self, other: SavePolicy) -> AllOf:
        return AllOf(self, other)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class EverySteps(_Composable):
    """At every n-th step."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"a save every {self.steps} steps: the number must be 1 at least")

    @property
    def deterministic(self) -> bool:
        return True

    def due(self, now: Moment) -> bool:
        return now.step > 0 and now.step % self.steps == 0

    def __str__(self) -> str:
        return f"every {self.steps} steps"


@dataclass(frozen=True, slots=True)
class EverySeconds(_Composable):
    """Once so many seconds have passed since the last save."""

    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UsageError(f"a save every {self.seconds} seconds: the number must be above 0")

    def due(self, now: Moment) -> bool:
        return now.unsaved_steps > 0 and now.unsaved_s >= self.seconds

    def __str__(self) -> str:
        return f"every {self.seconds!r}s"


@dataclass(frozen=True, kw_only=True, slots=True)
class YoungDaly(_Composable):
    """At the interval that loses least, between saving too often and repeating too much after a preemption."""

    hazard_per_s: float | None = None  # where it is known better than by measurement
    fallback_s: float = 600.0  # until a save was measured and a hazard is known
    least_s: float = 1.0
    most_s: float = 3600.0  # however quiet the market was so far

    def __post_init__(self) -> None:
        if self.hazard_per_s is not None and not (math.isfinite(self.hazard_per_s) and self.hazard_per_s >= 0):
            raise UsageError(f"a hazard of {self.hazard_per_s} per second: it must be finite and not negative")
        if not 0 < self.least_s <= self.most_s < math.inf or not self.fallback_s > 0:
            raise UsageError(
                f"intervals of {self.least_s} to {self.most_s} s, else {self.fallback_s} s: above 0, and in this order"
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
    """When this machine's end is announced: at once, and again while it lives, so that little is lost with it; but
    only what can be finished in time."""

    again_after_s: float = 15.0  # a save that is younger is good enough, unless even less time is left
    policy: NoticePolicy = NoticePolicy()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not self.again_after_s > 0:
            raise UsageError(f"saves every {self.again_after_s} s at a notice: the number must be above 0")

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
        if left_s is None or left_s <= 0 or now.under_way_for_s is not None:  # the next step asks again
            return False
        if self.decide(now).choice != "save":
            return False
        if now.noticed_s is not None and (now.last_saved_s or 0.0) < now.noticed_s:
            return True  # none was begun since
        last_chance_s = left_s if now.save_s is None else self.policy.spare_s(left_s, now.save_s)
        return now.unsaved_s >= min(self.again_after_s, last_chance_s)

    def __str__(self) -> str:
        return "at notice"


@dataclass(frozen=True, slots=True, init=False)
class AnyOf(_Composable):
    """When at least one of them says so."""

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: SavePolicy) -> None:
        object.__setattr__(self, "policies", _flat(policies, AnyOf))

    @property
    def deterministic(self) -> bool:
        return all(policy.deterministic for policy in self.policies)

    def due(self, now: Moment) -> bool:
        return any(policy.due(now) for policy in self.policies)

    def __str__(self) -> str:
        return " or ".join(map(str, self.policies))


@dataclass(frozen=True, slots=True, init=False)
class AllOf(_Composable):
    """When all of them say so."""

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: SavePolicy) -> None:
        object.__setattr__(self, "policies", _flat(policies, AllOf))

    @property
    def deterministic(self) -> bool:
        return all(policy.deterministic for policy in self.policies)

    def due(self, now: Moment) -> bool:
        return all(policy.due(now) for policy in self.policies)

    def __str__(self) -> str:
        return " and ".join(f"({p})" if isinstance(p, AnyOf) else str(p) for p in self.policies)


def _flat(policies: tuple[SavePolicy, ...], kind: type[AnyOf] | type[AllOf]) -> tuple[SavePolicy, ...]:
    """(a | b) | c is a | b | c."""
    flat: list[SavePolicy] = []
    for policy in policies:
        flat.extend(policy.policies if isinstance(policy, kind) else [policy])
    if not flat:
        raise UsageError(f"{kind.__name__} of no policies never says anything: give at least one")
    return tuple(flat)


def daly_interval_s(save_cost_s: float, hazard_per_s: float) -> float:
    """The training time between two saves that is expected to lose least (Daly 2006, the higher-order estimate).

    For a cost that is small against the mean time between preemptions this is Young's sqrt(2 × cost / hazard).
    """
    if save_cost_s < 0 or hazard_per_s < 0:
        raise UsageError(f"a save of {save_cost_s} s at {hazard_per_s} preemptions per second: neither may be negative")
    mean_s = 1 / hazard_per_s if hazard_per_s > 0 else math.inf
    if save_cost_s >= 2 * mean_s:
        return mean_s
    if math.isinf(mean_s):
        return mean_s
    ratio = save_cost_s / (2 * mean_s)
    return math.sqrt(2 * save_cost_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_cost_s


_STEPS = re.compile(r"(?:every\s+)?(\d+)\s*steps?\Z|every\s+steps?\Z")
_SECONDS = re.compile(r"(?:every\s+)?([\d.]+(?:e[-+]?\d+)?\s*[a-z]*)\Z")
_LIKE = "every 100 steps, every 60s, 100 steps or 60s, young-daly, at notice"


def parse_policy(text: str) -> SavePolicy:
    """``every 100 steps``, ``60s``, ``young-daly``, ``at notice``; joined by ``or`` and ``and``, which binds closer."""
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
    raise UsageError(f"{text!r} is no policy for saving ({term!r} is not understood): write it like {_LIKE}")
