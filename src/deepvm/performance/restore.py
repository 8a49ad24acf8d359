"""How long a restore takes, from the loss of the workers to the end of their next step: figures in, seconds out.

Pure. Figures that a catalogue lacks have defaults here, each with its source. The planner's forecast uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from deepvm.errors import UsageError
from deepvm.json_fields import json_fields
from deepvm.performance.checks import check_number

CONNECTIONS = 2  # to each memory node, as the checkpointer makes them
FLOW_BYTES_PER_S = 5e9 / 8  # EC2's limit for one flow outside a placement group
CHECKSUM_BYTES_PER_S = 8e9  # xxh3 on one core; 16 GiB/s on an idle memory bus

DETECTION_S = 0.1  # how often the elastic agent polls its workers
RENDEZVOUS_S = 1.0  # torchrun, two workers: 2.2 s to their first all-reduce, half of it the import
IMPORT_S = 1.2  # a fresh interpreter with `import torch` from a warm cache
TEMPLATE_S = 0.02  # a worker forked from a template
MODEL_S = 0.3  # constructing a model of 100 million parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class RestorePath:
    """What a restore transfers, and over which links."""

    state_bytes: float
    worker_link_bytes_per_s: float
    node_link_bytes_per_s: float
    memory_nodes: int = 1
    workers: int = 1  # that restore at once, and share the nodes' links; each of them needs the whole state
    connections: int = CONNECTIONS  # of each worker to each node
    flow_bytes_per_s: float = FLOW_BYTES_PER_S  # at most, of one connection; inf where nothing limits it
    checksum_bytes_per_s: float = CHECKSUM_BYTES_PER_S  # of one worker, while bytes arrive

    on_demand: bool = False  # the first loss waits for what it needs, the rest arrives after it
    first_loss_share: float = 1.0  # of the state that it needs; a third of Adam's
    overlapped: bool = False  # bytes arrive while the worker starts, meets the others and builds its model
    template: bool = False  # workers are forked, not started

    detection_s: float = DETECTION_S
    rendezvous_s: float = RENDEZVOUS_S
    import_s: float = IMPORT_S
    template_s: float = TEMPLATE_S
    model_s: float = MODEL_S
    first_step_s: float = 0.0

    def __post_init__(self) -> None:
        check_number("state_bytes", self.state_bytes, at_least=0)
        check_number("first_loss_share", self.first_loss_share, at_least=0, at_most=1)
        for what in ("worker_link_bytes_per_s", "node_link_bytes_per_s", "flow_bytes_per_s", "checksum_bytes_per_s"):
            if getattr(self, what) != math.inf:
                check_number(what, getattr(self, what), above=0)
        for what in ("memory_nodes", "workers", "connections"):
            check_number(what, getattr(self, what), at_least=1)
        for what in ("detection_s", "rendezvous_s", "import_s", "template_s", "model_s", "first_step_s"):
            check_number(what, getattr(self, what), at_least=0)
        if self.template_s > self.import_s:
            raise UsageError(
                f"template_s is {self.template_s:g} and import_s {self.import_s:g}: "
                "a worker from a template must not be slower than a fresh one"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreTime:
    """The parts of a restore, in their order. Where the fetch is overlapped, the longer side counts."""

    detection_s: float
    entry_s: float  # until the worker's own code runs with torch imported
    rendezvous_s: float
    model_s: float
    fetch_s: float  # of what the first loss needs
    first_step_s: float
    total_s: float
    rest_s: float  # of the fetch, behind the first loss; not in the total
    bound_by: str  # what the fetch waits for

    def to_json(self) -> dict[str, Any]:
        return json_fields(
            self, "detection_s entry_s rendezvous_s model_s fetch_s first_step_s total_s rest_s bound_by"
        )


def fetch_rate(path: RestorePath) -> tuple[float, str]:
    """Return the bytes a second that reach one worker while all restore at once, and what limits them."""
    limits = {
        "the worker's link": path.worker_link_bytes_per_s,
        "the memory nodes' links": path.memory_nodes * path.node_link_bytes_per_s / path.workers,
        "its connections": path.memory_nodes * path.connections * path.flow_bytes_per_s,
        "checksums": path.checksum_bytes_per_s,
    }
    name = min(limits, key=limits.__getitem__)
    return limits[name], name


def restore_time(path: RestorePath) -> RestoreTime:
    rate, bound_by = fetch_rate(path)
    needed = path.state_bytes * (path.first_loss_share if path.on_demand else 1.0)
    fetch_s = needed / rate
    entry_s = path.template_s if path.template else path.import_s
    start_s = entry_s + path.rendezvous_s + path.model_s
    brought_s = max(start_s, fetch_s) if path.overlapped else start_s + fetch_s
    return RestoreTime(
        detection_s=path.detection_s,
        entry_s=entry_s,
        rendezvous_s=path.rendezvous_s,
        model_s=path.model_s,
        fetch_s=fetch_s,
        first_step_s=path.first_step_s,
        total_s=path.detection_s + brought_s + path.first_step_s,
        rest_s=(path.state_bytes - needed) / rate,
        bound_by=bound_by,
    )


def restore_s(path: RestorePath) -> float:
    """Return the seconds from the loss of the workers to the end of their next step."""
    return restore_time(path).total_s
