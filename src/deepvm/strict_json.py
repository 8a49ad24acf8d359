"""Parse untrusted JSON: bytes in, checked values out. Stores, nodes and plans are read with it.

Size, depth and the number of values are checked before anything is parsed, so that a small document cannot take much
memory, time or stack. Every problem is a MalformedJson; each caller turns it into its own error.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepvm.errors import MalformedFile

MOST_DEPTH = 64
MOST_VALUES = 1_000_000

_ONE_KIND = bytes.maketrans(b"{}", b"[]")  # whether each is closed by its own kind is for the parser to find
_NOT_STRUCTURE = bytes(code for code in range(256) if code not in b'[]{}",')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80


class MalformedJson(ValueError):
    """What is wrong with a document, in one sentence without control characters."""


def loads(
    data: bytes | bytearray | memoryview | str,
    *,
    most_bytes: int,
    most_depth: int = MOST_DEPTH,
    most_values: int = MOST_VALUES,
    small_integers: bool = False,
) -> Any:
    """Parse a document of UTF-8 JSON. NaN, infinity and lone surrogates are refused: they cannot be written again. With
    ``small_integers``, so are integers of more than 64 bits: floats cannot represent the largest ones."""
    if len(data) > most_bytes:
        raise MalformedJson(f"it has {len(data)} bytes, at most {most_bytes} are allowed")
    try:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        check_structure(raw, most_depth=most_depth, most_values=most_values)
        decoder = _small_decoder if small_integers else _decoder
        value = decoder.decode(raw.decode() if not isinstance(data, str) else data)
    except MalformedJson:
        raise
    except RecursionError:  # the stack was almost full before
        raise MalformedJson("it is nested too deep for what is left of the stack") from None
    except ValueError as error:  # UnicodeError is one
        raise MalformedJson(f"it is not valid JSON: {_first_line(error)}") from None
    if _SURROGATE.search(raw):
        _check_encodable(value)
    return value


def read_file(path: Path | str, *, most_bytes: int, hint: str, most_values: int = MOST_VALUES) -> Any:
    """Parse a file that a user named. MalformedFile if it cannot be read or is not JSON."""
    data = read_bytes(path, most_bytes=most_bytes, hint=hint)
    try:
        return loads(data, most_bytes=most_bytes, most_values=most_values)
    except MalformedJson as error:
        raise MalformedFile(path, f"{error}; {hint}") from None


def read_bytes(path: Path | str, *, most_bytes: int, hint: str) -> bytes:
    """Read a file that a user named, or a device without an end. MalformedFile if it cannot be read or is too long."""
    try:
        with open(path, "rb") as file:
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise MalformedFile(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > most_bytes:
        raise MalformedFile(path, f"it has more than {most_bytes:,} bytes, at most these are allowed: {hint}")
    return data


def check_structure(raw: bytes | bytearray, *, most_depth: int, most_values: int) -> None:
    """Check depth and number of values by the brackets and commas outside of strings. The parser would notice only
    after it has recursed or allocated. This takes a third of its time. Writers call it, too."""
    outside = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_ONE_KIND, _NOT_STRUCTURE)
    strings = outside.count(b'"') // 2  # each value has a key at most; splitting millions of them would take seconds
    if strings > 2 * most_values + 2:
        raise MalformedJson(f"it has {strings} strings, at most {most_values} values are allowed")
    if strings:
        outside = b"".join(outside.split(b'"')[::2])
    brackets = outside.replace(b",", b"")
    values = len(outside) - len(brackets) + len(brackets) // 2
    if values > most_values:
        raise MalformedJson(f"it has about {values} values, at most {most_values} are allowed")
    for _ in range(most_depth):
        if not brackets:
            return
        found = len(brackets)
        brackets = brackets.replace(b"[]", b"")  # the innermost level
        if len(brackets) == found:
            raise MalformedJson("it is not valid JSON: its brackets do not match")
    if brackets:
        raise MalformedJson(f"it is nested more than {most_depth} deep")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MalformedJson(f"{brief(text)} is not a finite number")
    return value


def _refuse_constant(text: str) -> None:
    raise MalformedJson(f"{text} is not JSON")


def _small(text: str) -> int:
    if len(text) <= _MOST_DIGITS and abs(value := int(text)) < 2**64:
        return value
    raise MalformedJson(f"{brief(text)} is an integer of more than 64 bits")


_MOST_DIGITS = 21  # with a sign
_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
_small_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant, parse_int=_small)


def _check_encodable(value: Any) -> None:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError:
                raise MalformedJson(f"{brief(one)} is not valid text") from None
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()


def _first_line(error: Exception) -> str:
    text = str(error).split("\n")[0][:200]
    return text if text.isprintable() else ascii(text)


# --- values: the exact type and a range, or MalformedJson -------------------------------------------------------------


def brief(value: object) -> str:
    """Show a value in a few printable characters, for an error."""
    text = _brief.repr(value)
    return text if text.isprintable() else ascii(text)[:200]


def integer(value: Any, what: str, least: int, most: int) -> int:
    """Check an integer; neither a bool nor 4.0 is one."""
    if type(value) is not int or not least <= value <= most:
        raise MalformedJson(f"{what} is {brief(value)}, not an integer from {least} to {most}")
    return value


def number(value: Any, what: str, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise MalformedJson(f"{what} is {brief(value)}, not a number from {least:g} to {most:g}")
    return float(value)


def text(value: Any, what: str, most: int, *, least: int = 0) -> str:
    """Check text; it has no control characters."""
    if type(value) is not str or not least <= len(value) <= most or not value.isprintable():
        raise MalformedJson(f"{what} is {brief(value)}, not printable text of {least} to {most} characters")
    return value


def flag(value: Any, what: str) -> bool:
    if type(value) is not bool:
        raise MalformedJson(f"{what} is {brief(value)}, neither true nor false")
    return value


def array(value: Any, what: str, most: int = MOST_VALUES) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise MalformedJson(f"{what} is {brief(value)}, not a list of at most {most}")
    return value


def numbers(
    value: Any, what: str, least: float, most: float, *, missing: bool = False, whole: bool = False
) -> list[Any]:
    """Check a list of numbers, or of integers only, at the speed of C. With ``missing``, some may be null."""
    rows = array(value, what)
    known = [row for row in rows if row is not None] if missing else rows
    allowed = {int} if whole else {int, float}
    if not set(map(type, known)) <= allowed:
        wrong: Any = next(row for row in known if type(row) not in allowed)
    elif known and not (least <= min(known) and max(known) <= most):
        wrong = next(row for row in known if not least <= row <= most)
    else:
        return rows
    kind = "an integer" if whole else "a number"
    raise MalformedJson(f"{what} has {brief(wrong)}, not {kind} from {least:g} to {most:g}")


def texts(value: Any, what: str) -> list[str]:
    """Check a list of texts, of any characters, at the speed of C."""
    rows = array(value, what)
    if not set(map(type, rows)) <= {str}:
        raise MalformedJson(f"{what} has {brief(next(row for row in rows if type(row) is not str))}, which is not text")
    return rows


def table(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise MalformedJson(f"{what} is {brief(value)}, not an object")
    return value


def member(document: Mapping[str, Any], name: str) -> Any:
    if name not in document:
        raise MalformedJson(f"{brief(name)} is missing")
    return document[name]


def check_plain(value: Any, what: str, *, most_depth: int, most_values: int) -> None:
    """Check that a value of our own can be written as JSON and read back within these limits."""
    level: Iterable[Any] = (value,)
    count = 0
    for _ in range(most_depth + 1):
        below: list[Any] = []
        for one in level:
            count += 1
            if isinstance(one, Mapping):
                if any(type(key) is not str for key in one):
                    raise MalformedJson(f"{what} has a key that is not text")
                below += one.values()
            elif isinstance(one, (list, tuple)):
                below += one
            elif isinstance(one, float):
                if not math.isfinite(one):
                    raise MalformedJson(f"{what} has {one}, which is not a finite number")
            elif one is not None and not isinstance(one, (str, int)):
                raise MalformedJson(f"{what} has a {type(one).__name__}, which is not JSON")
        if count + len(below) > most_values:
            raise MalformedJson(f"{what} has more than {most_values} values")
        if not below:
            return
        level = below
    raise MalformedJson(f"{what} is nested more than {most_depth} deep")
