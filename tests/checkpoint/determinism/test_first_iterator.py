"""Generators after a loader's first iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deepvm.checkpoint.determinism import first_iterator, rng_state


class Loader:
    """What torchdata's loader has: a method that makes its iterator; the iterator tells whether it was at its end."""

    def __init__(self, **attributes: Any) -> None:
        self._attributes = attributes

    def state_dict(self) -> dict[str, Any]:
        return {}

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def _get_iterator(self) -> Any:
        return type("Made", (), self._attributes)()


@pytest.mark.parametrize(
    ("attributes", "put"), [({}, True), ({"_finished": False}, True), ({"_finished": True}, False)]
)
def test_generators_are_set_again_unless_the_iterator_was_at_its_end(
    attributes: dict[str, Any], put: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(rng_state, "put", lambda _: calls.append("as before"))
    loader = Loader(**attributes)
    first_iterator.FirstIterators({"loader": loader}, lambda: calls.append("as saved"))

    loader._get_iterator()
    assert calls == ["as saved" if put else "as before"]
    loader._get_iterator()
    assert len(calls) == 1
