"""`make newest`: an environment with the newest packages in, what differs from the pins and what broke out."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[1]
_TAIL = 40  # lines of a failed step


def pinned(text: str) -> dict[str, str]:
    """Return the versions that a constraints file pins for this interpreter."""
    versions = {}
    for line in text.splitlines():
        requirement, _, marker = line.partition(" ; ")
        if "==" in requirement and (not marker or Marker(marker).evaluate()):
            name, version = requirement.split("==")
            versions[canonicalize_name(name)] = version
    return versions


def main(environment: str) -> int:
    """Compare, run `make check` and `make test` with the environment, and return 1 if one of them failed."""
    pins = pinned((_ROOT / "constraints.txt").read_text(encoding="utf-8"))
    installed = {canonicalize_name(each.name): each.version.partition("+")[0] for each in metadata.distributions()}
    changed = [
        f"  {name} {pins.get(name, 'not pinned')} -> {version}"
        for name, version in sorted(installed.items())
        if name not in ("deepvm", "pip") and pins.get(name) != version
    ]
    print("\n".join(["other than pinned:", *changed]) if changed else "the pins are the newest", flush=True)
    broken = [step for step in ("check", "test") if not _passes(step, environment)]
    print(f"broke with the newest packages: {', '.join(broken)}" if broken else "nothing broke")
    return 1 if broken else 0


def _passes(step: str, environment: str) -> bool:
    done = subprocess.run(
        ["make", "--no-print-directory", step, f"VENV={environment}"],
        cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    shown = lines[-1:] if done.returncode == 0 else lines[-_TAIL:]
    print(f"make {step}: {'passed' if done.returncode == 0 else 'FAILED'}", *shown, sep="\n  ", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
