"""A copy of the tree with an interpreter of its own, in which faults are put and tests run.

The interpreter sees the packages of the environment that runs `make mutate`, and the copy's `src` before them. So every
process that a test starts with `sys.executable` imports the copy, whatever its environment variables are.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tools.recorder import Recorder

ROOT = Path(__file__).parents[2]
_COMMANDS = {"deepvm": "deepvm.cli:main", "deepvm-fetch": "deepvm.fetch.command:main"}


def files_of_tree() -> list[str]:
    """List what git knows and what is new, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    return sorted(name for name in listed.splitlines() if (ROOT / name).is_file())


def make(folder: Path, *, observed: bool) -> Recorder | None:
    """Copy the tree into `folder`, with an interpreter in `folder/venv`; `observed` records executed lines."""
    for name in files_of_tree():
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=120)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv" / "lib" / version / "site-packages"
    lines = [str(folder / "tree" / "src"), f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"]
    recorder = None
    if observed:
        recorder = Recorder(folder / "recorder", folder / "tree" / "src", module="deepvm_line_hits")
        lines += [str(recorder.folder), "import deepvm_line_hits"]
    (packages / "0_deepvm_scratch.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for command, entry in _COMMANDS.items():
        module, function = entry.split(":")
        script = folder / "venv" / "bin" / command
        script.write_text(
            f"#!{folder}/venv/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n",
            encoding="utf-8",
        )
        script.chmod(0o755)
    for program in Path(sys.executable).parent.iterdir():  # a test looks for an S3 server beside its interpreter
        beside = folder / "venv" / "bin" / program.name
        if not beside.exists():
            beside.symlink_to(program)
    return recorder
