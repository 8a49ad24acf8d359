"""The scripts that users copy: killed and started again, they end with the weights of a run that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.checkpoint.scripts import Script

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", [pytest.param("digits.py", marks=pytest.mark.chaos), "characters.py"])
def test_a_killed_example_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    words = ("--steps", "24", "--batch", "16", "--seed", "3", "--save-weights")
    script, policy = EXAMPLES / name, {"DEEPVM_POLICY": "every 4 steps"}
    undisturbed = tmp_path / "undisturbed.safetensors"
    said = Script(script, tmp_path / "truth", *words, str(undisturbed), **policy).finish()
    assert "begins after step 0 of 24" in said

    first = Script(script, tmp_path / "killed", *words, "never", "--step-time", "0.05", **policy)
    try:
        first.wait_for_step(14)
    finally:
        first.kill()
    saved = max(event["step"] for event in first.events("save") if event["state"] == "remote")
    assert 8 <= saved < 24

    resumed = tmp_path / "resumed.safetensors"
    again = Script(script, tmp_path / "killed", *words, str(resumed), **policy)
    told = again.finish()
    (restored,) = again.events("restored")
    assert restored["step"] >= saved
    assert f"begins after step {restored['step']} of 24" in told
    assert resumed.read_bytes() == undisturbed.read_bytes()
    assert told.splitlines()[-1] == said.splitlines()[-1]
    assert said.splitlines()[-1].startswith("weights: sha256 ")


def test_an_example_runs_without_any_environment_and_learns(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    said = Script(
        EXAMPLES / "digits.py", tmp_path, "--steps", "100", DEEPVM_STORE="", DEEPVM_EVENTS="", TMPDIR=str(temporary)
    ).finish()
    right = float(said.split("% of 300 digits")[0].splitlines()[-1])
    assert right > 90
    assert list(temporary.iterdir()) == []
