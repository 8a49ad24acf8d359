"""The skeleton in a checkpoint's header -> whether its tags are those that a save writes. ``verify`` calls it, without
torch; ``checkpoint.state.skeleton`` rebuilds it.

A skeleton names types and devices of torch. Such a name must look like one: it is looked up when the state is restored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import Corrupt
from deepvm.store.safetensors import MOST_HEADER_BYTES, MOST_HEADER_VALUES, parse_header

STATE_FORMAT = "deepvm-state/1"
MOST_STATE_DEPTH = 500  # of what is read
MOST_SAVED_DEPTH = 200  # of what is written: a restore needs four frames of Python's thousand for each level
FACTORIES = ("int", "float", "bool", "str", "list", "dict", "set", "tuple", "Counter", "OrderedDict", "None")
_DTYPE = re.compile(r"bool|bits\d+(x\d+)?|q?u?int\d+(x\d+)?|b?float\d+(_\w+)?|complex\d+")
_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_NUMPY_DTYPE = re.compile(r"[<>|=][a-zA-Z]\d*(\[\w+\])?")


def is_dtype_name(name: object) -> bool:
    """True if a name may be that of a type of tensors: ``bfloat16``, ``float8_e4m3fn``."""
    return type(name) is str and _DTYPE.fullmatch(name) is not None


def is_device_name(name: object) -> bool:
    """True if a name may be that of a device: ``cuda:1``."""
    return type(name) is str and _DEVICE.fullmatch(name) is not None


def is_array_dtype(name: object) -> bool:
    """True if a name may be that of a type of NumPy's arrays, without objects and fields: ``<M8[ns]``."""
    return type(name) is str and _NUMPY_DTYPE.fullmatch(name) is not None and name[1] != "O"


def check_header(header: bytes, size_bytes: int) -> None:
    """Raise Corrupt if a restore or ``verify`` would refuse a file that begins so. A save asks before it commits."""
    check_skeletons(parse_header(header, size_bytes).metadata)


def check_text(text: bytes | bytearray, *, above: int = 0) -> None:
    """Raise MalformedJson if a component's part of a skeleton, or all parts with ``above`` levels around them, are too
    much for a restore to read."""
    if len(text) > MOST_HEADER_BYTES:
        raise strict.MalformedJson(f"it takes {len(text)} bytes as text, at most {MOST_HEADER_BYTES} are allowed")
    strict.check_structure(text, most_depth=MOST_SAVED_DEPTH + above, most_values=MOST_HEADER_VALUES - 100_000)


def check_skeletons(metadata: Mapping[str, str]) -> None:
    """Raise Corrupt if the header of a checkpoint of a Checkpointer has a skeleton that no save writes."""
    if metadata.get("format") != STATE_FORMAT:
        return
    try:
        found = strict.loads(
            strict.member(metadata, "skeleton"),
            most_bytes=MOST_HEADER_BYTES, most_depth=MOST_STATE_DEPTH, most_values=MOST_HEADER_VALUES,
        )  # fmt: skip
        waiting: list[Any] = []
        for skeleton in strict.array(found, "the ranks' states"):
            waiting += strict.table(skeleton, "a rank's state").values()  # a component's name may begin with $
        while waiting:
            value = waiting.pop()
            if type(value) is dict:
                _check_tag(value)
                rows = value.get("$module")
                if type(rows) is dict and not is_items(rows):
                    waiting += rows.values()  # a parameter's name may begin with $
                else:
                    waiting += [rows] if "$module" in value else value.values()  # versions have modules' names
            elif type(value) is list:
                waiting += value
    except strict.MalformedJson as error:
        raise Corrupt(f"the saved state cannot be read: {error}") from None


def _check_tag(row: dict[str, Any]) -> None:
    tags = [key for key in row if key.startswith("$")]
    if not tags:
        return
    check = _TAGS.get(tags[0])
    if len(tags) > 1 or check is None:
        raise strict.MalformedJson(f"it has {strict.brief(tags)}, which this version does not know")
    if not check(row[tags[0]]):
        raise strict.MalformedJson(f"it has {tags[0]} {strict.brief(row[tags[0]])}, which no save writes")
    if tags[0] == "$inline" and not is_dtype_name(row.get("dtype")):
        raise strict.MalformedJson(f"it has a tensor of type {strict.brief(row.get('dtype'))}")
    if tags[0] == "$numpy" and "dtype" in row and not is_array_dtype(row["dtype"]):
        raise strict.MalformedJson(f"it has an array of type {strict.brief(row['dtype'])}")
    if tags[0] == "$defaultdict" and row.get("factory") not in FACTORIES:
        raise strict.MalformedJson(f"it has a defaultdict of {strict.brief(row.get('factory'))}")
    if tags[0] == "$tensor" and "real" in row and not is_dtype_name(row["real"]):
        raise strict.MalformedJson(f"it has a tensor of type {strict.brief(row['real'])}")


def is_items(rows: Mapping[str, Any]) -> bool:
    """True if a mapping is stored as a list of pairs: some of its keys begin with ``$``, or are not text."""
    return rows.keys() == {"$items"} and type(rows["$items"]) is list


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_list(value: object) -> bool:
    return type(value) is list


def _is_object(value: object) -> bool:
    return type(value) is dict


_TAGS: dict[str, Callable[[object], bool]] = {
    "$tensor": _is_text, "$wrapper": _is_text, "$float": _is_text, "$bytes": _is_text, "$inline": _is_text,
    "$surrogates": _is_text, "$ordered": _is_object, "$counter": _is_object, "$defaultdict": _is_object,
    "$tuple": _is_list, "$set": _is_list, "$frozenset": _is_list, "$items": _is_list, "$complex": _is_list,
    "$module": _is_object, "$numpy": _is_object, "$dtype": is_dtype_name, "$device": is_device_name,
}  # fmt: skip
