"""Values as JSON: an object in, a dictionary of its named fields out. Plans, catalogues and reports use it."""

from __future__ import annotations

from datetime import date
from enum import Enum
from typing import Any


def json_fields(value: object, names: str) -> dict[str, Any]:
    """Read the named fields in this order. Callers list them by hand: programs rely on the names in a document."""
    return {name: json_value(getattr(value, name)) for name in names.split()}


def json_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, tuple | list):
        return [json_value(item) for item in value]
    return value.to_json() if hasattr(value, "to_json") else value
