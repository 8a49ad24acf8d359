"""Runs a target of the fuzzer to its end, and tells what it found."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SEED = int(os.environ.get("DEEPVM_FUZZ_SEED", "1"))
SCALE = float(os.environ.get("DEEPVM_FUZZ_SCALE", "1"))
INPUT_S = 10  # one input may take so long, on a machine that does much else
MEMORY_MB = 2048

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris has no wheel for this Python: pip install atheris where it has one",
)


def fuzz(tmp_path: Path, module: str, name: str, seeds: list[bytes], runs: int) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    wanted = max(1, int(runs * SCALE))
    flags = [
        f"-runs={wanted}", f"-seed={SEED}", f"-timeout={INPUT_S}", f"-rss_limit_mb={MEMORY_MB}", "-max_len=16384",
        "-print_final_stats=1", f"-artifact_prefix={tmp_path}/",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzz_process", f"tests.fuzz.{module}", name, *flags, str(corpus)],
        capture_output=True, timeout=900, cwd=ROOT, check=False,
    )  # fmt: skip
    told = done.stderr.decode(errors="replace") + done.stdout.decode(errors="replace")
    assert done.returncode == 0, told[-6000:]
    executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", told)
    assert executed is not None, told[-2000:]
    assert int(executed[1]) >= wanted, told[-2000:]
    print(f"{name}: {executed[1]} inputs")
