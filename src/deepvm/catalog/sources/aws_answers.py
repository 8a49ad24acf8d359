"""AWS's answers: one described machine type or one entry of the price list in, an Instance or a price out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from deepvm.catalog.model import Instance
from deepvm.catalog.sources.aws_names import accelerator_name, architecture_of, quota_family_of


def instance_of(row: Mapping[str, Any]) -> Instance:
    name = row["InstanceType"]
    gpus = row.get("GpuInfo", {}).get("Gpus") or row.get("NeuronInfo", {}).get("NeuronDevices") or []
    gpu: Mapping[str, Any] = gpus[0] if gpus else {}
    gpu_gib = _gib(gpu.get("MemoryInfo", {}).get("SizeInMiB"))
    # A slice of a GPU is listed as zero GPUs, one logical GPU, and its fraction of a GPU.
    count = gpu.get("Count") or gpu.get("LogicalGpuCount", 0) * gpu.get("GpuPartitionSize", 0.0)
    supported = row.get("ProcessorInfo", {}).get("SupportedArchitectures", [])
    cards = row.get("NetworkInfo", {}).get("NetworkCards", [])
    return Instance(
        name=name,
        family=quota_family_of(name),
        vcpus=_positive(row.get("VCpuInfo", {}).get("DefaultVCpus")),
        memory_gib=_gib(row.get("MemoryInfo", {}).get("SizeInMiB")),
        accelerator=accelerator_name(gpu["Name"], gpu_gib) if count else None,
        accelerator_count=float(count),
        accelerator_memory_gib=gpu_gib if count else None,
        architecture=next((a for a in ("x86_64", "arm64") if a in supported), architecture_of(name)),
        burst_gbps=_sum(cards, "PeakBandwidthInGbps"),
        sustained_gbps=_sum(cards, "BaselineBandwidthInGbps"),
    )


def _positive(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None


def _gib(mib: Any) -> float | None:
    size = _positive(mib)
    return None if size is None else round(size / 1024, 3)


def _sum(cards: list[Mapping[str, Any]], field: str) -> float | None:
    """Sum over all network cards; None if any is unknown."""
    values = [_positive(card.get(field)) for card in cards]
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


def price_of(text: str) -> tuple[str, float] | None:
    """Read the type and its hourly price from one entry, a JSON document in a string."""
    try:
        entry = json.loads(text)
        attributes = entry["product"]["attributes"]
        if attributes.get("operation", "RunInstances") != "RunInstances":
            return None  # the same machine with other software or another contract
        for term in entry["terms"]["OnDemand"].values():
            for dimension in term["priceDimensions"].values():
                usd = amount(dimension["pricePerUnit"].get("USD"))
                if usd is not None and dimension.get("unit", "Hrs") == "Hrs":
                    return attributes["instanceType"], usd
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None  # another kind of entry: the type's price stays missing
    return None


def amount(text: Any) -> float | None:
    try:
        return _positive(float(text))
    except (TypeError, ValueError):
        return None
