"""Read electrical power while something runs: energy counters or nvidia-smi in, mean watts out; None where neither is.

RAPL's counters (``/sys/class/powercap``) tell the energy of processor packages, nvidia-smi the power of a GPU.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import threading
import time
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_EVERY_MS = 200


class PowerMeter:
    """A context: ``watts`` is the mean between enter and exit. ``gpu`` is the index of an NVIDIA GPU, or None."""

    def __init__(self, gpu: int | None = None, *, powercap: Path = POWERCAP) -> None:
        self.gpu, self.powercap = gpu, powercap
        self.watts: float | None = None

    def __enter__(self) -> PowerMeter:
        self._began = time.monotonic()
        self._before = _energies(self.powercap)
        self._smi = None if self.gpu is None else _GpuPower.start(self.gpu)
        return self

    def __exit__(self, *_: object) -> None:
        parts = [self._package_watts(), None if self._smi is None else self._smi.stop()]
        known = [watts for watts in parts if watts is not None]
        self.watts = sum(known) if known else None

    def _package_watts(self) -> float | None:
        elapsed = time.monotonic() - self._began
        after = _energies(self.powercap)
        joules = 0.0
        for zone, (before_uj, most_uj) in self._before.items():
            if zone not in after:
                return None
            used = after[zone][0] - before_uj
            joules += (used + (most_uj if used < 0 else 0)) / 1e6  # the counter wraps
        return joules / elapsed if self._before and elapsed > 0 else None


def _energies(powercap: Path) -> dict[str, tuple[int, int]]:
    """Return the counters of all packages: microjoules, and where the counter wraps."""
    found = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        with contextlib.suppress(OSError, ValueError):  # readable by root only on many systems
            most = int((zone / "max_energy_range_uj").read_text())
            found[zone.name] = (int((zone / "energy_uj").read_text()), most)
    return found


class _GpuPower:
    """nvidia-smi in its loop, read by a thread."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.samples = process, list[float]()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @classmethod
    def start(cls, gpu: int) -> _GpuPower | None:
        program = shutil.which("nvidia-smi")
        if program is None:
            return None
        query = ["--query-gpu=power.draw", "--format=csv,noheader,nounits", f"--id={gpu}", f"--loop-ms={_EVERY_MS}"]
        try:
            process = subprocess.Popen(
                [program, *query],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return None
        return cls(process)

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with contextlib.suppress(ValueError):  # "[N/A]" where the GPU does not tell
                self.samples.append(float(line))

    def stop(self) -> float | None:
        self.process.terminate()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=5)
        self.reader.join(timeout=5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return statistics.fmean(self.samples) if self.samples else None
