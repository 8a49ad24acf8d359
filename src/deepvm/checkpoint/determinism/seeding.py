"""A seed -> a repeatable process: generators, flags and threads set, and a report of what could not be set."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from deepvm.checkpoint.determinism.rng_state import cuda_in_use, seed_all
from deepvm.errors import UsageError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_REPEATABLE = (":4096:8", ":16:8")  # cuBLAS documents these two; the first is the faster one
MOST = 2**32  # NumPy's seeds are smaller


@dataclass(frozen=True, kw_only=True, slots=True)
class DeterminismReport:
    """What ``deterministic`` has set and what it could not. Print it."""

    seed: int
    threads: int
    done: tuple[str, ...]
    not_done: tuple[str, ...]

    def generator(self, number: int = 0) -> torch.Generator:
        """Return a separate generator for a loader or a sampler: ``DataLoader(..., generator=made.generator())``."""
        return torch.Generator().manual_seed(self.seed + number)

    @staticmethod
    def worker_init(worker_id: int) -> None:  # noqa: ARG004
        """For ``DataLoader(worker_init_fn=...)``: sets the flags in workers that are spawned, not forked. torch seeds
        their generators."""
        _choose_kernels([])

    def __str__(self) -> str:
        rows = [f"seed {self.seed}"]
        rows += [f"  set      {row}" for row in self.done]
        rows += [f"  NOT set  {row}" for row in self.not_done]
        return "\n".join(rows)


def deterministic(seed: int, *, threads: int | None = None) -> DeterminismReport:
    """Make this process repeatable: generators, torch's and CUDA's flags, the number of threads.

    The same seed gives the same run on the same kind of machine, with the same numbers of ranks and threads and the
    same versions. Call it first, before the model is created and before CUDA is used. ``threads`` is the number of
    torch's threads (default: unchanged). For different random numbers on each rank (dropout), pass ``seed + rank``.
    """
    if not isinstance(seed, int) or not 0 <= seed < MOST:
        raise UsageError(f"a seed is a whole number from 0 to 2**32 - 1, not {seed!r}")
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads cannot compute anything: pass 1 or more, or leave it out")
    done: list[str] = []
    not_done: list[str] = []
    _seed(seed, done, not_done)
    _choose_kernels(done)
    _set_cublas(done, not_done)
    _fix_threads(threads, done, not_done)
    _check_hash_seed(_environment_at_start(), done, not_done)
    return DeterminismReport(seed=seed, threads=torch.get_num_threads(), done=tuple(done), not_done=tuple(not_done))


def _seed(seed: int, done: list[str], not_done: list[str]) -> None:
    with_numpy = "numpy" in sys.modules  # it imports numpy.random at its first use
    seed_all(seed, with_numpy=with_numpy)
    seeded = "Python, torch" + (", CUDA" if torch.cuda.is_available() else "") + (", NumPy" if with_numpy else "")
    if not with_numpy:
        not_done.append("NumPy's generator: numpy is not imported yet; numpy.random.seed(seed) when it is")
    done.append(f"generators: {seeded}")


def _choose_kernels(done: list[str]) -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    done.append("torch.use_deterministic_algorithms: operations that cannot repeat themselves raise an error")
    done.append("cuDNN: deterministic, no benchmark")
    if hasattr(torch.backends.mkldnn, "deterministic"):
        torch.backends.mkldnn.deterministic = True  # type: ignore[assignment]
        done.append("oneDNN: deterministic")


def _set_cublas(done: list[str], not_done: list[str]) -> None:
    found = os.environ.get(CUBLAS)
    if found not in (None, *CUBLAS_REPEATABLE):
        not_done.append(
            f"{CUBLAS} is {found}, with which cuBLAS may not repeat itself: start with {CUBLAS_REPEATABLE[0]}"
        )
        return
    if found is None and cuda_in_use():
        not_done.append(f"{CUBLAS}: CUDA was used before; call deterministic() first, or start with it")
        return
    os.environ.setdefault(CUBLAS, CUBLAS_REPEATABLE[0])
    done.append(f"{CUBLAS}={os.environ[CUBLAS]}")


def _fix_threads(threads: int | None, done: list[str], not_done: list[str]) -> None:
    wanted = threads or torch.get_num_threads()
    torch.set_num_threads(wanted)
    done.append(f"{wanted} thread{'s' if wanted > 1 else ''}: a resumed run needs as many")
    outside = os.environ.get("OMP_NUM_THREADS")
    if outside != str(wanted):
        not_done.append(
            f"OMP_NUM_THREADS is {outside or 'not set'}: libraries beside torch may use another number; start with "
            f"OMP_NUM_THREADS={wanted}"
        )


def _check_hash_seed(environment: Mapping[str, str], done: list[str], not_done: list[str]) -> None:
    found = environment.get("PYTHONHASHSEED")
    if found and found != "random":
        done.append(f"PYTHONHASHSEED={found}, since Python was started")
    else:
        not_done.append(
            "PYTHONHASHSEED: Python reads it when it starts; without it the order of sets of strings differs between "
            "processes. Start with PYTHONHASHSEED=0"
        )


def _environment_at_start() -> dict[str, str]:
    """Return the environment that Python was started with; os.environ may have changed since."""
    try:
        rows = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return dict(os.environ)
    return dict(row.partition("=")[::2] for row in rows if "=" in row)
