"""``python -m benchmarks summary``: results/*.json in, results/README.md out: promised, met, beside whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import display

RESULTS = Path(__file__).parent / "results"
BESIDE = {
    "agreement": "the simulator, on the same market",
    "calibration": "what the predicted configurations take",
    "checkpoint": "the paper's scheme, torch.save, safetensors, DCP, five other packages, memcpy, iperf3",
    "sharing": "the same saves without a look for shared chunks",
    "curves": "torch.save and torch.load",
    "flows": "one connection",
    "market": "a walk over all ticks, Daly's formula, Uniform Progress, an oracle",
    "planner": "the paper's method as nested loops",
    "recovery": "torchrun with torch.save and torch.load",
    "restore": "torch.load, safetensors, a fresh interpreter, iperf3",
    "risk": "the fastest plan, which stays and waits",
    "training": "the same training without saves",
    "transfer": "iperf3, two plain processes with and without checksums",
}


def write() -> Path:
    """Write the summary of the results that are there, and return its path."""
    path = RESULTS / "README.md"
    path.write_text(text(), encoding="utf-8")
    return path


def text() -> str:
    """Return the summary of all results."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    lines = [
        "# Results at a glance",
        "",
        "Written by `python -m benchmarks summary` from the JSON files here. A promise is a target of a benchmark,",
        "a figure is a median. Each subject's page has all figures, the machine and the versions.",
        "",
        "| subject | promises met | beside | measured | commit |",
        "|---|--:|---|---|---|",
        *(_overview(result) for result in results),
    ]
    for result in results:
        promised = _promised(result)
        lines += [
            "",
            f"## {result['name']}",
            "",
            "| promised | target | measured | quartiles | met |",
            "|---|--:|--:|--:|---|",
        ]
        lines += [_row(figures) for figures in promised]
    return "\n".join(lines) + "\n"


def _promised(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [figures for figures in result["measurements"] if figures["met"] is not None]


def _overview(result: dict[str, Any]) -> str:
    name, around, promised = result["name"], result["environment"], _promised(result)
    met = sum(figures["met"] for figures in promised)
    share = f"{met} of {len(promised)}" if met == len(promised) else f"**{met} of {len(promised)}**"
    return f"| [{name}]({name}.md) | {share} | {BESIDE[name]} | {around['date'].split()[0]} | {around['commit']} |"


def _row(figures: dict[str, Any]) -> str:
    what = f"{figures['what']} ({figures['note']})" if figures["note"] else figures["what"]
    return (
        f"| {what} | {display.target(figures)} | {display.value(figures['median'], figures['unit'])} "
        f"| {display.quartiles(figures)} | {'yes' if figures['met'] else '**no**'} |"
    )
