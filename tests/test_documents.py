"""Figures and forms that documents repeat are those of their sources."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from deepvm.catalog import Market, load
from tests.support import ROOT

README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


def median(benchmark: str, what: str) -> float:
    document = json.loads((ROOT / "benchmarks" / "results" / f"{benchmark}.json").read_text(encoding="utf-8"))
    return float(next(row["median"] for row in document["measurements"] if row["what"] == what))


def test_the_discount_of_the_readme_is_that_of_gpu_types_in_the_default_catalogue() -> None:
    catalog = load("aws-2026-08")
    usd = {
        market: dict(zip(prices.instance.tolist(), prices.usd_per_hour.tolist(), strict=True))
        for market, prices in catalog.prices.items()
    }
    gpus = [row for row, instance in enumerate(catalog.instances) if instance.accelerator is not None]
    less = [1 - usd[Market.SPOT][row] / usd[Market.ON_DEMAND][row] for row in gpus]
    said = f"{100 * np.median(less):.0f} % less in the median of the {len(gpus)} GPU types in `{catalog.name}`"
    assert f"{said}, {100 * max(less):.0f} % at best" in README


def test_the_times_of_the_readme_are_those_of_the_results() -> None:
    ours, theirs = (median("recovery", what) for what in ("deepvm run", "torchrun with torch.save and torch.load"))
    stall = median("checkpoint", "ResNet-50 + Adam: stall, published over deepvm")
    lazy = median("restore", "warm file to first loss, lazy, over torch.load + load_state_dict")
    assert f"| {ours:.1f} s; torchrun with `torch.save` {theirs:.1f} s |" in README
    assert f"| {stall:.1f} times shorter |" in README
    assert f"| {lazy:.2f} of `torch.load` |" in README


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name[:4])
def test_a_decision_has_the_common_headings_and_is_listed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    title = re.match(r"# (\d+\. .+)\n\nStatus: ", text)
    assert re.findall(r"(?m)^## (.+)$", text) == ["Context", "Decision", "Consequences", "Alternatives"]
    assert title is not None
    assert f"- [{title[1]}]({page.name})" in (page.parent / "README.md").read_text(encoding="utf-8")


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
