"""The state of one save: from the saver, which makes it, through a transfer into the first store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepvm.checkpoint.handle import SaveHandle
from deepvm.checkpoint.snapshot.snapshot import Snapshot
from deepvm.checkpoint.state.capture import join
from deepvm.errors import CheckpointError, Corrupt, NotFound
from deepvm.protocol.frames import fingerprint
from deepvm.store.base import Store
from deepvm.store.state_check import STATE_FORMAT, check_header, check_text
from deepvm.strict_json import MalformedJson

Texts = dict[str, bytearray]  # a rank's plain values, as JSON by component


def save_name(session: str, attempt: int) -> str:
    """Return the name of one save in its manifest's facts: a step that is saved again has another name."""
    return f"{fingerprint(session)}/{attempt}"


def is_committed(store: Store, run: str, step: int, name: str) -> bool:
    """True if a store has this very save, and not only an older one of the same step."""
    try:
        return store.manifest(run, step).facts.get("save") == name
    except (NotFound, Corrupt):
        return False


class HeaderFull(CheckpointError):
    """The plain values of the state need more room than the header has."""


@dataclass(kw_only=True)
class SaveJob:
    handle: SaveHandle  # what the caller sees of it
    snapshot: Snapshot
    plain_values: Texts | str  # this rank's, or those of all ranks joined
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the manifest
    ends_s: float = 0.0  # the deadline, on the monotonic clock
    nodes_down: tuple[str, ...] = ()  # memory nodes that did not receive it

    def skeleton(self) -> str:
        return self.plain_values if isinstance(self.plain_values, str) else join(self.plain_values)

    def write_header(self, skeletons: Sequence[str]) -> None:
        """Write the file's header, with the skeletons of all ranks, into staging memory."""
        layout, text = self.snapshot.chunk_map.layout, f"[{', '.join(skeletons)}]"
        header = layout.header({"format": STATE_FORMAT, "skeleton": text})
        if header is None:
            raise HeaderFull("the plain values of the state have outgrown the header: the next save makes room")
        self._check_readable(header, text)
        self.snapshot.staging.view[: len(header)] = header

    def _check_readable(self, header: bytes, text: str) -> None:
        """Raise CheckpointError if no restore could read this save, which would be committed for nothing. All of it is
        parsed once for each layout; later saves differ in plain values, whose amount is checked."""
        layout = self.snapshot.chunk_map.layout
        try:
            check_text(text.encode(), above=2)  # the list of ranks, and the components of each
            if layout.fingerprint not in _PARSED:
                check_header(header, layout.size_bytes)
                _PARSED.add(layout.fingerprint)
        except (MalformedJson, Corrupt) as error:
            name, problem = self._unreadable() or ("the state", str(error))
            raise CheckpointError(
                f"{name} could not be restored: {problem}; save many values as a tensor, and deep ones flat"
            ) from None

    def _unreadable(self) -> tuple[str, str] | None:
        """Return the component of this rank that is too much, and why."""
        if isinstance(self.plain_values, dict):
            for name, text in self.plain_values.items():
                try:
                    check_text(text)
                except MalformedJson as error:
                    return f"{name!r}", str(error)
        return None


_PARSED: set[str] = set()  # fingerprints of layouts with which this process has read a header of its own
