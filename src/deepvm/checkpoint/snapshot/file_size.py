"""A captured state -> the plan of its file, and its size by component, before any byte is copied.

The snapshotter plans its saves with it; ``deepvm profile`` asks it how large a save would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepvm.checkpoint.state.capture import Capture, Captured
from deepvm.checkpoint.state.layout import Layout, make_layout, spec_of
from deepvm.checkpoint.state.owners import Owners

HEADER_SLACK_BYTES = 32 * 1024  # plain values that grow (counters, schedules) without moving a tensor


def plan_layout(captured: Captured, owners: Owners, text_bytes: int, world_size: int) -> Layout:
    """Lay out the file, with room for the skeletons of all ranks."""
    specs = [spec_of(name, tensor) for name, tensor in captured.tensors.items()]
    # JSON within JSON: a character takes two at most
    room = (2 * text_bytes + HEADER_SLACK_BYTES) * world_size
    return make_layout(specs, {"skeleton": ""}, room, owners.stability(captured.tensors))


def skeleton_bytes(captured: Captured) -> int:
    return sum(2 * len(name) + len(text) + 8 for name, text in captured.texts.items())


@dataclass(frozen=True, kw_only=True)
class FileSize:
    """What a save of a state would write: its tensors, and the bytes of each component and of the header."""

    tensors: Mapping[str, torch.Tensor]
    component_bytes: Mapping[str, int]
    header_bytes: int


def file_size(components: Mapping[str, Any]) -> FileSize:
    """Capture the components, as a save of one rank does, and plan their file. Nothing is copied."""
    captured = Capture().take(components)
    layout = plan_layout(captured, Owners(components), skeleton_bytes(captured), 1)
    sizes = dict.fromkeys(components, 0)
    for entry in layout.entries:
        sizes[owner_of(entry.name, list(components))] += entry.bytes
    return FileSize(tensors=captured.tensors, component_bytes=sizes, header_bytes=layout.header_bytes)


def owner_of(name: str, components: Sequence[str]) -> str:
    """Return the component that a tensor's name belongs to: the longest that it begins with."""
    owners = [one for one in components if name.rstrip("'") == one or name.startswith(f"{one}.")]
    return max(owners, key=len)
