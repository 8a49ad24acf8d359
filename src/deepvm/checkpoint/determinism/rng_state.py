"""The random generators of this process <-> plain values that a checkpoint holds, for ``component``.

They are kept as bytes, not as tensors: each rank has its own generators, and tensors are the same on all ranks.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

Saved = Mapping[str, Any]
_PYTHON = struct.Struct("<625I")  # the Mersenne Twister's words, and its position in them
_PYTHON_VERSION = 3  # of random.getstate()


def take() -> dict[str, Any]:
    """Return the state of every generator in use: NumPy's and CUDA's only once they are loaded."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": {"version": version, "words": _PYTHON.pack(*words), "gauss": gauss},
        "torch": _bytes_of(torch.get_rng_state()),
    }
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        found["numpy"] = _without_arrays(numpy_random.get_state(legacy=False))
    if cuda_in_use():
        found["cuda"] = [_bytes_of(state) for state in torch.cuda.get_rng_state_all()]
    return found


def cuda_in_use() -> bool:
    """True if CUDA was started; does not start it."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def put(saved: Saved) -> list[str]:
    """Set every generator. Returns what could not be set, and why."""
    problems: list[str] = []
    python = saved["python"]
    if python["version"] == _PYTHON_VERSION:
        random.setstate((_PYTHON_VERSION, _PYTHON.unpack(python["words"]), python["gauss"]))
    else:
        problems.append(f"Python's generator was saved with version {python['version']}, not {_PYTHON_VERSION}")
    try:
        torch.set_rng_state(_tensor_of(saved["torch"]))
    except (RuntimeError, TypeError) as error:  # the state of another torch version may differ
        problems.append(f"torch's generator cannot be set: {error}")
    if "numpy" in saved:
        problems += _put_numpy(saved["numpy"])
    if "cuda" in saved:
        problems += _put_cuda(saved["cuda"])
    return problems


def derive(saved: Saved, rank: int) -> None:
    """Seed the generators of a rank that is not in the checkpoint from those of one that is."""
    seed = xxhash.xxh3_64_intdigest(saved["torch"], seed=rank)
    seed_all(seed, with_numpy="numpy" in saved or "numpy.random" in sys.modules)


def seed_all(seed: int, *, with_numpy: bool) -> None:
    random.seed(seed)
    torch.manual_seed(seed)  # CUDA's, too, at once or when it starts
    if with_numpy:
        import numpy.random

        numpy.random.seed(seed % 2**32)


def names(saved: Saved) -> list[str]:
    """Return the names of the saved generators."""
    devices = [f"cuda:{i}" for i in range(len(saved.get("cuda", [])))]
    return [name for name in ("python", "numpy", "torch") if name in saved] + devices


def _put_numpy(saved: Mapping[str, Any]) -> list[str]:
    try:
        import numpy.random  # the saved run used it, so this one will
    except ImportError:
        return ["NumPy's generator cannot be set: NumPy is not installed"]
    try:
        numpy.random.set_state(_with_arrays(saved))
    except (ValueError, TypeError, KeyError) as error:
        return [
            f"NumPy's generator cannot be set, it is of another kind than the saved {saved['bit_generator']}: {error}"
        ]
    return []


def _put_cuda(saved: list[bytes]) -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        for device, state in enumerate(saved[:count]):
            torch.cuda.set_rng_state(_tensor_of(state), device)
    except (RuntimeError, TypeError) as error:
        return [f"CUDA's generators cannot be set: {error}"]
    if count == len(saved):
        return []
    return [f"generators of {len(saved)} GPUs were saved, here are {count} GPUs"]


def _without_arrays(value: Any) -> Any:
    """Return NumPy's description of a generator with arrays as their type and bytes."""
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return {"dtype": value.dtype.str, "bytes": value.tobytes()} if value.shape else value.item()
    return value


def _with_arrays(value: Any) -> Any:
    import numpy

    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"dtype", "bytes"}:
        return numpy.frombuffer(value["bytes"], dtype=value["dtype"])
    return {key: _with_arrays(item) for key, item in value.items()}


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor_of(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
