"""Faults that `make mutate` makes."""

from __future__ import annotations

import pytest

from tools.mutate.__main__ import sample
from tools.mutate.faults import faults_of


def changes(text: str) -> set[str]:
    return {f"{fault.before} -> {fault.after}" for fault in faults_of("x.py", text)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a > b", {"a > b -> None", "a > b -> (a >= b)"}),
        ("x = a + b", {"a + b -> (a - b)"}),
        ("x = a and b", {"a and b -> (a or b)"}),
        ("x = not a", {"not a -> (a)"}),
        ("x = 3", {"3 -> (3 + 1)", "3 -> (3 - 1)"}),
        ("x += y", {"x += y -> x -= y"}),
        ("f(x)", {"f(x) -> pass"}),
        ("raise E('text')", {"raise E('text') -> pass"}),
        ("for y in x: break", {"break -> continue"}),
        ("if a: b = c", {"a -> (not (a))"}),
    ],
)
def test_a_statement_of_a_function_has_these_faults(line: str, expected: set[str]) -> None:
    assert changes(f"def function(a, b):\n    {line}\n") == expected


@pytest.mark.parametrize(
    "text",
    [
        '"""A docstring of 3 words."""',
        "def function(a: int | None = None) -> tuple[int, 3]: ...",
        "def function():\n    log.warning('%d', a + 1)",
        "def function():\n    time.sleep(3)",
        "def function():\n    assert a > 3",
        "def function():\n    x = f'{a + 1}'",
        "class Box:\n    def __repr__(self):\n        return 3",
        "TIMEOUT_S = 3",
        "Names = str | None",
    ],
)
def test_texts_types_and_pauses_have_none(text: str) -> None:
    assert changes(text) == set()


def test_a_fault_replaces_its_own_text_and_nothing_else() -> None:
    text = "def function(é, b):\n    x = 'é' if (é >\n        b) else 2\n    return x\n"
    made = {fault.after: fault.apply(text) for fault in faults_of("x.py", text)}

    assert made["(é >= b)"] == "def function(é, b):\n    x = 'é' if ((é >= b)) else 2\n    return x\n"
    assert made["(2 + 1)"] == text.replace("else 2", "else (2 + 1)")


def test_a_fault_of_a_constant_is_tried_where_its_name_is_used() -> None:
    (fault, *_) = faults_of("x.py", "LIMIT = 3\n")

    assert fault.names == ("LIMIT",)
    assert fault.statements == ()


def test_a_sample_stays_the_same_when_another_file_changes() -> None:
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(40))
    texts = {"src/deepvm/a.py": text, "src/deepvm/b.py": "def g(x):\n    return x - 1\n"}

    def sampled() -> set[str]:
        faults = [fault for name in texts for fault in faults_of(name, texts[name])]
        return {fault.key for fault in sample(faults, texts, seed=1, count=20) if fault.path == "src/deepvm/a.py"}

    before = sampled()
    texts["src/deepvm/b.py"] = "\n" + texts["src/deepvm/b.py"]

    assert sampled() == before
    assert len(before) >= 19
