"""Environments for peers that the project does not depend on: one each, outside the repository, made once and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"  # installed first, so that no peer's open range brings another build of several GB
INSTALL_DEADLINE_S = 300


@dataclass(frozen=True, kw_only=True)
class Environment:
    name: str
    requirements: tuple[str, ...]


ENVIRONMENTS = {
    e.name: e
    for e in (
        Environment(name="torch_checkpointing", requirements=("torch_checkpointing==0.1.1",)),
        Environment(name="torchsnapshot", requirements=("torchsnapshot==0.1.0", "setuptools<81")),
        Environment(name="dlrover", requirements=("dlrover==0.6.1", "grpcio")),
        Environment(name="lm-resiliency", requirements=("lm-resiliency==0.2.0",)),
        Environment(name="torchft", requirements=("torchft==0.2.0",)),
    )
}


class Unavailable(Exception):
    """A peer that cannot run here; the text says why, and goes into the result."""


def cache() -> Path:
    return Path(os.environ.get("DEEPVM_BENCH_CACHE", Path.home() / ".cache" / "deepvm-bench"))


def python(name: str) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there."""
    environment = ENVIRONMENTS[name]
    home = cache() / "venvs" / name
    interpreter, marker = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join((TORCH, *environment.requirements))
    if marker.exists() and marker.read_text(encoding="utf-8") == wanted:
        return interpreter
    print(f"installing {name} into {home} (once)", file=sys.stderr)
    try:
        shutil.rmtree(home, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(home))
        pip = (str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run(*pip, TORCH, "numpy")
        _run(*pip, TORCH, "numpy", *environment.requirements)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"its installation took longer than {INSTALL_DEADLINE_S} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
        raise Unavailable(f"it does not install: {lines[-1] if lines else error}") from None
    marker.write_text(wanted, encoding="utf-8")
    return interpreter


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_DEADLINE_S)
