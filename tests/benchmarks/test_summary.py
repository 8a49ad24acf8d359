"""The summary of benchmark results."""

from __future__ import annotations

import json

from benchmarks import summary


def test_the_summary_is_current() -> None:
    written = (summary.RESULTS / "README.md").read_text(encoding="utf-8")

    assert written == summary.text(), "run `python -m benchmarks summary`"


def test_every_promise_is_in_the_summary_with_what_was_measured() -> None:
    text = summary.text()

    for path in summary.RESULTS.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert f"| [{result['name']}]({result['name']}.md) |" in text
        for figures in result["measurements"]:
            if figures["met"] is not None:
                assert f"| {figures['what']}" in text
