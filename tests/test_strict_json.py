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
