"""The JSON documents in a checkpoint's metadata, checked for restore and replay. Anyone with access to the store may
have written them, so anything wrong with one is Corrupt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import Corrupt
from deepvm.store.safetensors import MOST_HEADER_BYTES, MOST_HEADER_VALUES
from deepvm.store.state_check import MOST_STATE_DEPTH, is_items


def parse(text: Any, what: str) -> Any:
    try:
        if type(text) is not str:
            raise strict.MalformedJson("it is missing")
        return strict.loads(
            text, most_bytes=MOST_HEADER_BYTES, most_depth=MOST_STATE_DEPTH, most_values=MOST_HEADER_VALUES
        )
    except strict.MalformedJson as error:
        raise Corrupt(f"{what} cannot be read: {error}") from None


def skeleton_of_rank(metadata: Mapping[str, str], rank: int) -> dict[str, Any]:
    """Return the rank's state without its tensors, for each component. If fewer ranks saved, their skeletons are used
    in turn."""
    skeletons = parse(metadata.get("skeleton"), "the saved state")
    if type(skeletons) is not list or not skeletons or any(type(one) is not dict for one in skeletons):
        raise Corrupt(f"the saved state is {strict.brief(skeletons)}, not one object for each rank")
    found: dict[str, Any] = skeletons[rank % len(skeletons)]
    return found


def witness_rows(metadata: Mapping[str, str], format_wanted: str, step: int) -> list[dict[str, str]]:
    """Return every rank's hashes; ranks after the first list only what differs."""
    if metadata.get("format") != format_wanted:
        raise Corrupt(f"the witness has format {strict.brief(metadata.get('format'))}")
    found = parse(metadata.get("witness"), "the witness")
    if type(found) is not dict or found.get("step") != step:
        raise Corrupt(f"the witness is {strict.brief(found)}, not one of step {step}")
    rows = found.get("ranks")
    if type(rows) is not list or not rows or not all(_are_hashes(row) for row in rows):
        raise Corrupt(f"the witness lists {strict.brief(rows)}, not the hashes of each rank")
    first: dict[str, str] = rows[0]
    return [{**first, **own} for own in rows]


def _are_hashes(row: Any) -> bool:
    return type(row) is dict and all(type(value) is str for value in row.values())


# --- parts of a skeleton ------------------------------------------------------------------------------------------

_PLAIN_ROW = {"$tensor", "stride"}  # the keys of a row whose tensor has the bytes of the one that was saved


def is_tensor_row(row: Any) -> bool:
    """True if a part of a skeleton stands for a tensor."""
    return isinstance(row, dict) and not row.keys().isdisjoint({"$tensor", "$wrapper", "$inline"})


def names_of_tensors(skeleton: Any) -> set[str]:
    """Return the names of all tensors in a skeleton."""
    found: set[str] = set()
    waiting = [skeleton]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            name = value.get("$tensor")
            if isinstance(name, str):
                found.add(name)
            else:
                waiting += value.values()
    return found


def module_rows(skeleton: Any) -> dict[str, Any]:
    """Return the part of a module's skeleton for each name in its state: a parameter's may begin with ``$``."""
    rows = skeleton.get("$module", skeleton) if isinstance(skeleton, dict) else None
    if isinstance(rows, dict) and is_items(rows):
        pairs = rows["$items"]
        if all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is str for pair in pairs):
            return dict(pairs)
    if not isinstance(rows, dict):
        raise Corrupt(f"the saved state of a module is {strict.brief(rows)}")
    return rows


def module_tensors(skeleton: Any) -> dict[str, str]:
    """Return the keys of a module's skeleton, with the names of the tensors that are saved for them as they are."""
    rows = skeleton.get("$module") if isinstance(skeleton, dict) else None
    if not isinstance(rows, dict):
        return {}
    return {key: row["$tensor"] for key, row in rows.items() if isinstance(row, dict) and row.keys() <= _PLAIN_ROW}
