"""torch.distributed.checkpoint's metadata <-> JSON in the file's header. Nothing is pickled.

format   deepvm-dcp/1
dcp      {"tensors": {fqn: {"dtype", "size", "requires_grad", "shards": [[name in the file, offsets, sizes]]}},
          "objects": {fqn: {"value": skeleton, "tensors": {name: [type, shape, base64]}}},
          "planner": skeleton of the planner's own data}
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from deepvm.checkpoint.state.documents import parse
from deepvm.checkpoint.state.layout import dtype_named
from deepvm.checkpoint.state.skeleton import Tensors, flatten, rebuild
from deepvm.errors import CheckpointError, Corrupt
from deepvm.store.safetensors import Header, TensorEntry

FORMAT = "deepvm-dcp/1"


@dataclass(frozen=True)
class Shard:
    """One shard of a tensor and the place of its bytes."""

    entry: TensorEntry
    dtype: torch.dtype
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Contents:
    metadata: Metadata  # its storage_data maps each shard's index to a Shard
    objects: Mapping[str, Any]


def encode_object(value: Any, name: str) -> dict[str, Any]:
    """Encode a value that is not a tensor. Raises CheckpointError if it is not plain."""
    tensors = Tensors()
    document = {"value": flatten(value, name, tensors)}
    if tensors:
        document["tensors"] = {
            key: [_dtype_text(tensor.dtype), list(tensor.shape), base64.b64encode(_bytes(tensor)).decode()]
            for key, tensor in tensors.items()
        }
    return document


def decode_object(document: Mapping[str, Any]) -> Any:
    tensors = {}
    for name, (dtype, shape, text) in document.get("tensors", {}).items():
        data = bytearray(base64.b64decode(text))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        tensors[name] = flat.view(dtype_named(dtype)).view(shape)
    return rebuild(document["value"], tensors)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def encode(metadata: Metadata, names: Mapping[MetadataIndex, str], objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the header's metadata."""
    tensors: dict[str, Any] = {}
    for fqn, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            tensors[fqn] = {
                "dtype": _dtype_text(found.properties.dtype),
                "size": list(found.size),
                "requires_grad": found.properties.requires_grad,
                "shards": [
                    [names[MetadataIndex(fqn, chunk.offsets)], list(chunk.offsets), list(chunk.sizes)]
                    for chunk in found.chunks
                ],
            }
        elif fqn not in objects:
            raise CheckpointError(f"{fqn} was planned, but no rank wrote it")
    document = {
        "tensors": tensors,
        "objects": dict(objects),
        "planner": encode_object(metadata.planner_data, "the planner's data"),
    }
    return {"format": FORMAT, "dcp": json.dumps(document, separators=(",", ":"), allow_nan=False)}


def decode(header: Header) -> Contents:
    found = header.metadata.get("format")
    if found != FORMAT:
        raise CheckpointError(
            f"it was saved with format {found!r}, not by torch.distributed.checkpoint ({FORMAT!r}): "
            "restore it with deepvm.Checkpointer"
        )
    entries = {entry.name: entry for entry in header.tensors}
    try:
        document = parse(header.metadata.get("dcp"), "the description of the shards")
        known: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in document["objects"]}
        shards: dict[MetadataIndex, Shard] = {}
        for fqn, row in document["tensors"].items():
            dtype, chunks = dtype_named(row["dtype"]), []
            for name, offsets, sizes in row["shards"]:
                if prod(sizes) * dtype.itemsize != entries[name].size_bytes or min(sizes, default=0) < 0:
                    raise Corrupt(f"shard {name} of {sizes} {dtype} has {entries[name].size_bytes} bytes")
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                shards[MetadataIndex(fqn, offsets)] = Shard(entries[name], dtype, tuple(sizes))
            properties = TensorProperties(dtype=dtype, requires_grad=bool(row["requires_grad"]))
            known[fqn] = TensorStorageMetadata(properties, torch.Size(row["size"]), chunks)
        planner_data = decode_object(document["planner"])
        return Contents(Metadata(known, planner_data=planner_data, storage_data=shards), document["objects"])
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise Corrupt(f"the description of the shards cannot be read: {type(error).__name__} {error}") from None


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
