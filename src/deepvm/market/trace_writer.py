"""Traces -> files in the form that ``trace`` reads: ``preemption/2-node/SET/us-east-1a_T4_1.json``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from deepvm.errors import UsageError
from deepvm.market.trace import Trace, TraceKind

_FOLDERS = {TraceKind.LAUNCH: "availability", TraceKind.HELD: "preemption"}


def write_trace(trace: Trace, folder: Path, *, name: str) -> Path:
    """Write a trace into the set ``name`` below a folder, and return its file. Its counts are of machines up."""
    zone = re.sub(r"[^A-Za-z0-9-]+", "-", trace.zone) or "unknown"
    accelerator = re.sub(r"[^A-Za-z0-9.-]+", "-", trace.accelerator or "machine")
    path = folder / _FOLDERS[trace.kind] / f"{trace.machines}-node" / name
    path /= f"{zone}_{accelerator}_{trace.accelerator_count}.json"
    metadata = {"gap_seconds": trace.gap_s, "tick_offset": 0}
    if trace.start is not None:
        metadata["start_time"] = trace.start.isoformat()  # type: ignore[assignment]
    document = {"metadata": metadata, "data": trace.up.tolist()}
    if trace.prices is not None:
        document["prices"] = [None if np.isnan(usd) else float(usd) for usd in trace.prices]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
    return path
