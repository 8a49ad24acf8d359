"""What is not counted: places that cannot run on this kind of machine, and faults that change no behaviour."""

from __future__ import annotations

from tools.mutate.faults import Fault

# (path, function, class or "" for what runs at import): why no test can notice a fault there
CANNOT_NOTICE: dict[tuple[str, str], str] = {
    ("checkpoint/snapshot/device.py", "Cuda"): "needs a GPU; what calls it runs with a stand-in",
    ("checkpoint/determinism/rng_state.py", "_put_cuda"): "needs a GPU",
    ("checkpoint/buffers/write_watch.py", "_userfaultfd"): "other processors, and kernels that refuse userfaultfd",
    ("catalog/accelerators.py", ""): "figures of vendors: only a second copy of them could differ",
    ("catalog/gpu_memory.py", ""): "figures of vendors: only a second copy of them could differ",
    ("catalog/sources/aws_network.py", ""): "figures of vendors: only a second copy of them could differ",
    ("paper/canvas.py", ""): "how figures look: sizes and colours",
}

# (path, statement's line of source, replacement): why nothing differs
NO_DIFFERENCE: dict[tuple[str, str, str], str] = {
    (
        "checkpoint/data/sampler.py",
        "self._given = None if rank is None or world_size is None else (rank, world_size)",
        "(rank is None and world_size is None)",
    ): "both are given or neither: one alone was refused before",
}


def reason(fault: Fault, text: str) -> str:
    """Return why a fault is not counted, or "" if it is."""
    path = fault.path.removeprefix("src/deepvm/")
    outer = fault.function.split(".")
    for depth in range(len(outer)):
        if why := CANNOT_NOTICE.get((path, ".".join(outer[: depth + 1]))):
            return why
    line = text.splitlines()[fault.line - 1].strip()
    return NO_DIFFERENCE.get((path, line, fault.after), "")
