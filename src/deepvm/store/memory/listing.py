"""What memory nodes list of a run: which steps can be read from them, and which were never committed. For store.py."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from deepvm.errors import Corrupt, StoreError
from deepvm.protocol.frames import Kind
from deepvm.protocol.placement import minimum_nodes
from deepvm.store.chunks import read_manifest
from deepvm.store.memory.answers import step_rows

if TYPE_CHECKING:
    from deepvm.store.memory.store import MemoryStore

log = logging.getLogger("deepvm.store")
_Rows = dict[str, dict[str, Any]]  # by node: its row of one step


class RunListing:
    """The answers of all nodes at one moment."""

    def __init__(self, store: MemoryStore, run: str) -> None:
        self._store, self._run = store, run
        answers, self._failure = store.call_each(run, Kind.STEPS)
        self._held: dict[int, _Rows] = {}
        for node, (answer, _) in answers.items():
            for row in step_rows(answer, node):
                self._held.setdefault(row["step"], {})[node] = row

    def whole_steps(self) -> list[int]:
        """Return the steps that can be read. If there is none and a node did not answer, raise."""
        whole = sorted(step for step, rows in self._held.items() if self._is_whole(step, rows, damaged=True))
        if self._failure is not None and not whole:
            raise self._failure
        for step in sorted(self._held):
            if step > max(whole, default=-1):
                self._warn(step)
        return whole

    def _warn(self, step: int) -> None:
        if self._failure is not None:
            reason = self._failure
            log.warning("step %d of run %s is not whole while a node does not answer: %s", step, self._run, reason)
        elif _is_durable(self._held[step]):
            log.warning(
                "step %d of run %s was committed, but a memory node lost its part: restore it from the durable store",
                step, self._run,
            )  # fmt: skip

    def uncommitted_steps(self) -> dict[int, list[str]]:
        """Return the steps that no trainer committed, and the nodes that have them. A copy of all chunks, at a node or
        in the durable store, proves a commit: the chunks come from published manifests only."""
        if self._failure is not None:
            return {}
        return {
            step: list(rows)
            for step, rows in self._held.items()
            if not _is_durable(rows) and not self._is_whole(step, rows)
        }

    def _is_whole(self, step: int, rows: _Rows, *, damaged: bool = False) -> bool:
        """True if a node has every chunk, or every chunk has a node among those that have the manifest: it lists the
        nodes that shared it. If no manifest is good and one is not, return ``damaged``."""
        found = False
        for node in rows:
            try:
                document = self._store.call(node, self._run, Kind.MANIFEST, {"step": step})[1]
                manifest = read_manifest(bytes(document), self._run, step, f"memory node {node}")
            except StoreError as error:
                found = found or (damaged and isinstance(error, Corrupt))
                continue
            alone = any(row.get("whole") for row in rows.values())
            return alone or len(rows) >= minimum_nodes(len(manifest.nodes), manifest.replicas)
        return found


def _is_durable(rows: _Rows) -> bool:
    return any(row["state"] == "durable" for row in rows.values())
