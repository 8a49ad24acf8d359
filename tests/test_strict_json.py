"""JSON from strangers: what we write we read again, limits are exact, and everything else is MalformedJson."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm import strict_json as strict
from deepvm.errors import Corrupt, MalformedFile, StoreError, UsageError
from deepvm.protocol import frames
from deepvm.store.base import MOST_FACTS_DEPTH, Manifest
from deepvm.store.safetensors import parse_header

# Strings that look like structure, so that a check which does not know strings would count them
TEXT = st.text(st.sampled_from('[]{}",:\\/ \nab\u20ac\x7f') | st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def test_millions_of_strings_are_refused_before_they_are_split() -> None:
    strings = b"[" + b'"",' * 2_000_000 + b'""]'
    tracemalloc.start()
    with pytest.raises(strict.MalformedJson, match="strings, at most 1000 values"):
        strict.loads(strings, most_bytes=2**30, most_values=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(strings)


@given(JSON, st.booleans())
def test_what_is_written_is_read_again(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert strict.loads(text, most_bytes=10**6) == value
    assert strict.loads(text.encode(), most_bytes=10**6) == value


@given(JSON)
def test_the_limit_of_depth_is_exact(value: Any) -> None:
    text, levels = json.dumps(value), depth(value)
    assert strict.loads(text, most_bytes=10**6, most_depth=levels) == value
    if levels:
        with pytest.raises(strict.MalformedJson, match="deep"):
            strict.loads(text, most_bytes=10**6, most_depth=levels - 1)


@given(st.binary(max_size=60) | st.text(st.sampled_from('[]{}",:\\1a '), max_size=60).map(str.encode))
def test_any_bytes_are_a_document_or_malformed(data: bytes) -> None:
    with contextlib.suppress(strict.MalformedJson):
        json.dumps(strict.loads(data, most_bytes=100), allow_nan=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "NaN",
        "-Infinity",
        "1e999",
        "[1e999]",
        '"\\ud800"',
        '{"\\udfff": 1}',
        "[" * 10**5,
        "[]]",
        "'x'",
        "{1:2}",
        "[" + "[]," * 10**6 + "[]]",
        "9" * 5000,
        '"\x00"',
        "[}",
        '{"a":[{]}',
    ],
)
def test_what_others_take_is_malformed(text: str) -> None:
    with pytest.raises(strict.MalformedJson):
        strict.loads(text, most_bytes=10**8)


def test_what_is_too_long_is_not_parsed() -> None:
    with pytest.raises(strict.MalformedJson, match="at most 3"):
        strict.loads("[1, 2]", most_bytes=3)


def test_files_have_their_own_errors(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        strict.read_file(tmp_path / "none", most_bytes=10, hint="")
    (tmp_path / "bad").write_text("{")
    with pytest.raises(MalformedFile, match="write it anew"):
        strict.read_file(tmp_path / "bad", most_bytes=10, hint="write it anew")


@pytest.mark.parametrize(
    "meta", [{}, {"message": ""}, {"message": None}, {"message": [1]}, {"code": [], "message": " "}, {"code": "\x1b"}]
)
def test_a_refusal_without_words_still_says_something(meta: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="refused without a reason") as caught:
        frames.raise_error(meta)
    assert str(caught.value).isprintable()


INTEGER, NUMBER = "not an integer from 1 to 4", "not a number from 0.5 to 4"


@pytest.mark.parametrize(
    ("check", "good", "bad", "told"),
    [
        (lambda v: strict.integer(v, "x", 1, 4), [1, 4], [0, 5, True, 4.0, None, "2"], INTEGER),
        (lambda v: strict.number(v, "x", 0.5, 4), [0.5, 4, 1], [0.4, 4.5, True, None, "2", float("nan")], NUMBER),
        (lambda v: strict.text(v, "x", 3, least=1), ["a", "abc"], ["", "abcd", "a\n", None, 7],
         "not printable text of 1 to 3 characters"),
        (lambda v: strict.text(v, "x", 3), ["", "abc"], ["abcd"], "not printable text of 0 to 3 characters"),
        (lambda v: strict.flag(v, "x"), [True, False], [0, None, "true"], "neither true nor false"),
        (lambda v: strict.array(v, "x", 2), [[], [1, 2]], [[1, 2, 3], (1,), {}, None], "not a list of at most 2"),
        (lambda v: strict.table(v, "x"), [{}, {"a": 1}], [[], None, "a"], "not an object"),
    ],
)  # fmt: skip
def test_values_have_an_exact_type_and_range(check: Any, good: list[Any], bad: list[Any], told: str) -> None:
    for value in good:
        found = check(value)
        assert found == value
        assert type(found) in (type(value), float)
    for value in bad:
        with pytest.raises(strict.MalformedJson) as refused:
            check(value)
        assert str(refused.value) == f"x is {strict.brief(value)}, {told}"


@pytest.mark.parametrize(
    ("values", "options", "told"),
    [
        ([1, 2.5, 4], {}, None),
        ([], {}, None),
        ([1, None, 4], {"missing": True}, None),
        ([None], {"missing": True}, None),
        ([1, 4], {"whole": True}, None),
        ([1, None], {}, "x has None, not a number from 1 to 4"),
        ([1, 2, True], {}, "x has True, not a number from 1 to 4"),
        ([1, "2", None], {"missing": True}, "x has '2', not a number from 1 to 4"),
        ([1, 2.0], {"whole": True}, "x has 2.0, not an integer from 1 to 4"),
        ([2, 0.5, 5], {}, "x has 0.5, not a number from 1 to 4"),
        ([2, 4.5, 0], {}, "x has 4.5, not a number from 1 to 4"),
        ([2, 5], {}, "x has 5, not a number from 1 to 4"),
        ([0, 3], {}, "x has 0, not a number from 1 to 4"),
        ((1,), {}, "x is (1,), not a list of at most 1000000"),
    ],
)
def test_lists_of_numbers_name_the_first_that_is_wrong(values: Any, options: dict[str, bool], told: str | None) -> None:
    if told is None:
        assert strict.numbers(values, "x", 1, 4, **options) is values
    else:
        with pytest.raises(strict.MalformedJson) as refused:
            strict.numbers(values, "x", 1, 4, **options)
        assert str(refused.value) == told


def test_lists_of_texts_and_members() -> None:
    rows = ["a", "\x1b"]
    assert strict.texts(rows, "x") is rows
    assert strict.texts([], "x") == []
    with pytest.raises(strict.MalformedJson, match=r"^x has 7, which is not text$"):
        strict.texts(["a", 7, None], "x")
    assert strict.member({"a": None}, "a") is None
    with pytest.raises(strict.MalformedJson, match=r"^'b' is missing$"):
        strict.member({"a": None}, "b")


def test_values_of_errors_are_short_and_printable() -> None:
    shown = [strict.brief(value) for value in ("x" * 200, "\x1b\u202e", list(range(100)))]
    assert shown == ["'" + "x" * 37 + "..." + "x" * 38 + "'", "'\\x1b\\u202e'", "[0, 1, 2, 3, 4, 5, ...]"]

    class Odd:
        def __repr__(self) -> str:
            return "\x9b" * 300

    assert len(strict.brief(Odd())) == 200


NESTED = "[" * 64 + "]" * 64


@pytest.mark.parametrize(
    ("text", "how", "told"),
    [
        (NESTED, {}, None),
        ("[" + NESTED + "]", {}, "it is nested more than 64 deep"),
        ('{"a": [1, 2], "b": {}}', {"most_values": 5}, None),
        ('{"a": [1, 2], "b": {}}', {"most_values": 4}, "it has about 5 values, at most 4 are allowed"),
        ('["a", "b", "c"]', {"most_values": 3}, None),
        ('["a", "b", "c"]', {"most_values": 2}, "it has about 3 values, at most 2 are allowed"),
        ('["a", "b", "c", "d", "e"]', {"most_values": 1}, "it has 5 strings, at most 1 values are allowed"),
        ('["a", "b", "c", "d"]', {"most_values": 1}, "it has about 4 values, at most 1 are allowed"),
        ('["[", "{\\"", "\\\\", ",,,,"]', {"most_values": 4, "most_depth": 1}, None),
        ("[[]", {}, "it is not valid JSON: its brackets do not match"),
        ("[1}", {}, "it is not valid JSON: Expecting ',' delimiter: line 1 column 3 (char 2)"),
        ("1" * 22, {"small_integers": True}, "'1111111111111111111111' is an integer of more than 64 bits"),
        (str(2**64), {"small_integers": True}, f"'{2**64}' is an integer of more than 64 bits"),
        (str(-(2**64)), {"small_integers": True}, f"'{-(2**64)}' is an integer of more than 64 bits"),
        (str(2**64 - 1), {"small_integers": True}, None),
        (str(1 - 2**64), {"small_integers": True}, None),
        ("9" * 30, {}, None),
        ("1e400", {}, "'1e400' is not a finite number"),
        ("-Infinity", {}, "-Infinity is not JSON"),
        ('["\\ud800"]', {}, "'\\ud800' is not valid text"),
        ('{"a": {"\\ud800": 1}}', {}, "'\\ud800' is not valid text"),
        ('{"a": [{"b": ["\\uD83D\\uDE00"]}]}', {}, None),
        ('"a\x01"', {}, "it is not valid JSON: Invalid control character at: line 1 column 3 (char 2)"),
    ],
)
def test_limits_are_exact_and_problems_are_named(text: str, how: dict[str, Any], told: str | None) -> None:
    for data in (text, text.encode(), bytearray(text.encode()), memoryview(text.encode())):
        if told is None:
            assert strict.loads(data, most_bytes=len(text.encode()), **how) == json.loads(text)
        else:
            with pytest.raises(strict.MalformedJson) as refused:
                strict.loads(data, most_bytes=10**6, **how)
            assert str(refused.value) == told


def test_a_file_of_exactly_the_most_bytes_is_read(tmp_path: Any) -> None:
    path = tmp_path / "f.json"
    path.write_text("[1,2]")
    assert strict.read_file(path, most_bytes=5, hint="h", most_values=2) == [1, 2]
    assert strict.read_bytes(path, most_bytes=5, hint="h") == b"[1,2]"
    for problem, told in (
        (
            lambda: strict.read_bytes(path, most_bytes=4, hint="h"),
            "it has more than 4 bytes, at most these are allowed: h",
        ),
        (lambda: strict.read_file(path, most_bytes=9, hint="h", most_values=1), "it has about 2 values, at most 1 are"),
        (lambda: strict.read_bytes("a\0b", most_bytes=4, hint="h"), "it cannot be read: embedded null byte"),
        (lambda: strict.read_bytes(tmp_path, most_bytes=4, hint="h"), "it cannot be read: Is a directory"),
    ):
        with pytest.raises(MalformedFile) as refused:
            problem()
        assert told in str(refused.value)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": [1, 2.5, None, True, "x", ()]}, None),
        ([[[]]], None),
        ([[[[1]]]], "x is nested more than 3 deep"),
        ([1] * 7, None),
        ([1] * 8, "x has more than 8 values"),
        ({"a": {1: 2}}, "x has a key that is not text"),
        ([float("inf")], "x has inf, which is not a finite number"),
        ([b"a"], "x has a bytes, which is not JSON"),
        ({1}, "x has a set, which is not JSON"),
    ],
)
def test_plain_values_can_be_written_and_read_back(value: Any, told: str | None) -> None:
    if told is None:
        strict.check_plain(value, "x", most_depth=3, most_values=8)
        json.dumps(value, allow_nan=False)
    else:
        with pytest.raises(strict.MalformedJson) as refused:
            strict.check_plain(value, "x", most_depth=3, most_values=8)
        assert str(refused.value) == told


# --- manifests and headers ------------------------------------------------------------------------------------------

MANIFESTS = st.builds(
    lambda chunk, digests, rest, **fields: Manifest(
        chunk_bytes=chunk, digests=digests, size_bytes=max(1, len(digests) * chunk - rest % chunk), **fields
    ),
    chunk=st.integers(1, 2**20),
    digests=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
    rest=st.integers(0, 2**20),
    run=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    step=st.integers(0, 2**63 - 1),
    created_s=st.floats(0, 1e11),
    world_size=st.integers(1, 2**20),
    facts=st.dictionaries(TEXT, JSON, max_size=4),
)


@given(MANIFESTS)
def test_a_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    found = Manifest.from_bytes(manifest.to_bytes())
    assert {**vars(found), "digests": list(found.digests)} == {**vars(manifest), "digests": list(manifest.digests)}


def test_a_manifest_that_could_not_be_read_again_is_not_made() -> None:
    def make(facts: Any) -> Manifest:
        return Manifest(run="r", step=1, size_bytes=1, chunk_bytes=1, digests=[1], created_s=1.0, facts=facts)

    value: Any = 1
    for _ in range(MOST_FACTS_DEPTH - 1):
        value = [value]
    assert Manifest.from_bytes(make({"a": value}).to_bytes()).facts == {"a": value}
    for facts in ({"a": [value]}, {"a": float("inf")}, {1: 2}, {"a": object()}, {"a": {1}}, None, []):
        with pytest.raises(Corrupt):
            make(facts)


def test_a_document_has_at_most_a_million_values_unless_another_limit_is_given() -> None:
    text = b"[" + b"0," * 999_999 + b"0]"
    assert len(strict.loads(text, most_bytes=2**23)) == 1_000_000
    with pytest.raises(strict.MalformedJson, match="values"):
        strict.loads(b"[0," + text[1:], most_bytes=2**23)


def test_the_facts_of_a_manifest_have_at_most_200_000_values() -> None:
    def make(count: int) -> Manifest:
        facts = {"a": [0] * count}
        return Manifest(run="r", step=1, size_bytes=1, chunk_bytes=1, digests=[1], created_s=1.0, facts=facts)

    assert len(make(199_998).facts["a"]) == 199_998
    with pytest.raises(Corrupt, match="values"):
        make(199_999)


DTYPES = {"F32": 4, "U8": 1, "BF16": 2, "I64": 8}


@given(
    st.dictionaries(
        TEXT.filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=4)),
        max_size=5,
    ),
    st.dictionaries(TEXT, TEXT, max_size=3),
)
def test_a_header_is_read_as_it_was_written(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    rows: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPES[dtype]
        for n in shape:
            size *= n
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(rows).encode() + b"  "
    data = struct.pack("<Q", len(text)) + text
    header = parse_header(data, len(data) + at)
    assert header.metadata == metadata
    assert {t.name: (t.dtype, list(t.shape)) for t in header.tensors} == tensors
    with pytest.raises(Corrupt):
        parse_header(data, len(data) + at + 1)
