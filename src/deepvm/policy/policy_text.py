"""A text -> a save policy of ``saving``: for ``--save``, ``DEEPVM_POLICY`` and ``Checkpointer(policy=)``."""

from __future__ import annotations

import math
import re

from deepvm.errors import UsageError
from deepvm.policy.notice import NoticePolicy
from deepvm.policy.saving import (
    AllOf,
    AnyOf,
    AtNotice,
    EverySeconds,
    EverySteps,
    SavePolicy,
    YoungDaly,
    YoungDalyByAge,
)
from deepvm.units import parse_seconds

_TOKENS = re.compile(r"(\(|\)|\bor\b|\band\b)")
_STEPS = re.compile(r"(?:every\s+)?(\d+)\s*steps?\Z|every\s+steps?\Z")
_SECONDS = re.compile(r"(?:every\s+)?([\d.]+(?:e[-+]?\d+)?\s*[a-z]*)\Z")
_YOUNG_DALY = ("young-daly", "young/daly", "youngdaly", "daly")
_BY_AGE = ("young-daly by age", "by age")
_AT_NOTICE = ("at notice", "at-notice", "notice", "at a notice")
_GROUPS = {"": None, "any of": AnyOf, "all of": AllOf}
_LIKE = "every 100 steps, every 60s, 100 steps or 60s, young-daly:mtbf=2h, at notice"


def parse_policy(text: str) -> SavePolicy:
    """Parse ``every 100 steps``, ``60s``, ``young-daly:mtbf=2h``, ``at notice``. ``and`` binds closer than ``or``;
    brackets group."""
    words = " ".join(text.lower().replace("|", " or ").replace("&", " and ").split())
    tokens = [token.strip() for token in _TOKENS.split(words)]
    try:
        found, rest = _any_of([token for token in tokens if token], text)
    except RecursionError:
        raise _not_valid(text, "it has too many brackets") from None
    if rest:
        raise _not_valid(text, f"{rest[0]!r} is not expected")
    return found


def _any_of(tokens: list[str], text: str) -> tuple[SavePolicy, list[str]]:
    """Parse the tokens up to a closing bracket. Return the policy, and the tokens after it."""
    choices: list[SavePolicy] = []
    while not choices or tokens[:1] == ["or"]:
        terms: list[SavePolicy] = []
        tokens = tokens[1:] if choices else tokens
        while not terms or tokens[:1] == ["and"]:
            term, tokens = _term(tokens[1:] if terms else tokens, text)
            terms.append(term)
        choices.append(terms[0] if len(terms) == 1 else AllOf(*terms))
    return choices[0] if len(choices) == 1 else AnyOf(*choices), tokens


def _term(tokens: list[str], text: str) -> tuple[SavePolicy, list[str]]:
    word = tokens[0] if tokens else ""
    group = "" if word == "(" else word
    if group in _GROUPS and "(" in tokens[:2]:
        found, rest = _any_of(tokens[tokens.index("(") + 1 :], text)
        if rest[:1] != [")"]:
            raise _not_valid(text, "a closing bracket is missing")
        kind = _GROUPS[group]
        return found if kind is None else kind(found), rest[1:]
    return _leaf(word, text), tokens[1:]


def _leaf(word: str, text: str) -> SavePolicy:
    name, colon, options = (part.strip() for part in word.partition(":"))
    if name in _YOUNG_DALY:
        return _young_daly(_options(options, text) if colon else {}, text)
    if name in _BY_AGE:
        return _young_daly_by_age(_options(options, text) if colon else {}, text)
    if name in _AT_NOTICE:
        return _at_notice(_options(options, text) if colon else {}, text)
    if found := _STEPS.match(word):
        return EverySteps(int(found[1] or 1))
    if found := _SECONDS.match(word):
        try:
            return EverySeconds(parse_seconds(found[1]))
        except UsageError:
            pass
    raise _not_valid(text, f"{word!r} is unknown" if word else "a part is missing")


def _options(words: str, text: str) -> dict[str, str]:
    """Parse ``mtbf=2h,most=30min``."""
    found: dict[str, str] = {}
    for word in words.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or name in found:
            raise _not_valid(text, f"{word.strip()!r} is not a new NAME=VALUE")
        found[name] = value
    return found


def _young_daly(options: dict[str, str], text: str) -> YoungDaly:
    given = {}
    if "hazard" in options and "mtbf" in options:
        raise _not_valid(text, "hazard and mtbf exclude each other")
    if "hazard" in options:
        count, _, unit = options.pop("hazard").partition("/")
        if not unit.isalpha():
            raise _not_valid(text, "hazard has no unit such as 0.5/h")
        given["hazard_per_s"] = _number(count, text) / _seconds(f"1{unit}", text)
    if "mtbf" in options:
        mean_s = _seconds(options.pop("mtbf"), text)
        if mean_s == 0:
            raise _not_valid(text, "mtbf must be above 0")
        given["hazard_per_s"] = 1 / mean_s
    for name in ("fallback", "least", "most"):
        if name in options:
            given[f"{name}_s"] = _seconds(options.pop(name), text)
    _refuse(options, "hazard, mtbf, fallback, least, most", text)
    return YoungDaly(**given)


def _young_daly_by_age(options: dict[str, str], text: str) -> YoungDalyByAge:
    if missing := [name for name in ("share", "short", "long") if name not in options]:
        raise _not_valid(text, f"{missing[0]} is missing, as in young-daly by age:share=0.6,short=30min,long=8h")
    share = _number(options.pop("share"), text)
    times = {
        f"{name}_s": _seconds(options.pop(name), text)
        for name in ("short", "long", "fallback", "least", "most")
        if name in options
    }
    _refuse(options, "share, short, long, fallback, least, most", text)
    return YoungDalyByAge(short_share=share, **times)


def _at_notice(options: dict[str, str], text: str) -> AtNotice:
    again, margin, keep = (options.pop(name, None) for name in ("again", "margin", "keep"))
    _refuse(options, "again, margin, keep", text)
    plain = AtNotice()
    return AtNotice(
        plain.again_after_s if again is None else math.inf if again == "never" else _seconds(again, text),
        NoticePolicy(
            margin=plain.policy.margin if margin is None else _number(margin, text),
            keep_s=plain.policy.keep_s if keep is None else _seconds(keep, text),
        ),
    )


def _refuse(options: dict[str, str], known: str, text: str) -> None:
    for name in options:
        raise _not_valid(text, f"the option {name!r} is unknown, not one of {known}")


def _number(word: str, text: str) -> float:
    try:
        found = float(word)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise _not_valid(text, f"{word!r} is not a number")
    return found


def _seconds(word: str, text: str) -> float:
    try:
        return parse_seconds(word)
    except UsageError:
        raise _not_valid(text, f"{word!r} is not a duration") from None


def _not_valid(text: str, why: str) -> UsageError:
    return UsageError(f"{text!r} is not a valid save policy ({why}): write it like {_LIKE}")
