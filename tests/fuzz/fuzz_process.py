"""One target under the coverage-guided fuzzer, in a process of its own:
``python -m tests.fuzz.fuzz_process MODULE TARGET [FLAGS]``.

Byte mutations are libFuzzer's; every second one changes a JSON document as a document, so that inputs get past the
parser. Memory may not grow over the run, and no input may take longer than libFuzzer's ``-timeout``.
"""

from __future__ import annotations

import importlib
import json
import random
import resource
import sys
from typing import Any

import atheris

with atheris.instrument_imports(include=["deepvm"]):
    module = importlib.import_module(sys.argv[1])

GROWTH_KIB = 256 * 2**10  # with the fuzzer's own corpus
SETTLED = 2_000  # inputs, after which all is loaded
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 1.0, 0.5, 2**31, 2**63, 2**64, 10**400, -(2**70), 1e308, "", "x", "\x1b[2J", "\ud800",
    "\u202e", "[red]", "0" * 16, "0" * 64, [], {}, [[]], {"": {}}, [None] * 50,
]  # fmt: skip
target = module.TARGETS[sys.argv[2]]
seen = {"inputs": 0, "peak_kib": 0}


def one(data: bytes) -> None:
    target.one(data)
    seen["inputs"] += 1
    if seen["inputs"] == SETTLED:
        seen["peak_kib"] = peak_kib()
    elif seen["inputs"] % SETTLED == 0:
        grown = peak_kib() - seen["peak_kib"]
        assert grown < GROWTH_KIB, f"memory grew by {grown} KiB in {seen['inputs']} inputs"


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
    chance = random.Random(seed)
    begin, end = data.find(b"{"), data.rfind(b"}") + 1
    if chance.random() < 0.5 and 0 <= begin < end:
        try:
            document = changed(json.loads(data[begin:end]), chance)
            found = data[:begin] + json.dumps(document).encode() + data[end:]
            if len(found) <= most_bytes:
                return found
        except (ValueError, RecursionError):
            pass
    return bytes(atheris.Mutate(data, most_bytes))


def changed(value: Any, chance: random.Random) -> Any:
    """The document with something in it replaced, removed, added or wrapped."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        how = chance.random()
        if how < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.2:
            return {**value, chance.choice(["", "x", "__metadata__", "part_of", "\x1b"]): chance.choice(NASTY)}
        return {**value, key: changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        return [*value[:at], changed(value[at], chance), *value[at + (chance.random() < 0.8) :]]
    if chance.random() < 0.1:
        for _ in range(chance.choice([1, 5, 40, 100])):
            value = [value]
        return value
    if type(value) is int and chance.random() < 0.6:
        if value.bit_length() < 1000 and chance.random() < 0.4:
            return chance.choice([float, str, bool])(value)
        return value + chance.choice([-1, 1, 127, 2**20])
    return chance.choice(NASTY)


if __name__ == "__main__":
    getattr(module, "watch_threads", lambda: None)()
    atheris.Setup([sys.argv[0], *sys.argv[3:]], one, custom_mutator=mutate)
    atheris.Fuzz()
