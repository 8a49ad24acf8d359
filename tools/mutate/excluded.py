"""What is not counted: places that cannot run on this kind of machine, and faults that change no behaviour."""

from __future__ import annotations

from tools.mutate.faults import Fault

_TRANSFORMERS = "needs transformers, which the development environment lacks: its test is skipped without it"

# (path, function, class or "" for what runs at import): why no test can notice a fault there
CANNOT_NOTICE: dict[tuple[str, str], str] = {
    ("checkpoint/snapshot/device.py", "Cuda"): "needs a GPU; what calls it runs with a stand-in",
    ("checkpoint/determinism/rng_state.py", "_put_cuda"): "needs a GPU",
    ("checkpoint/buffers/write_watch.py", "_userfaultfd"): "other processors, and kernels that refuse userfaultfd",
    ("calibrate/models/transformers_config.py", "_model_class"): _TRANSFORMERS,
    ("calibrate/models/transformers_config.py", "_tokens"): _TRANSFORMERS,
    ("calibrate/models/transformers_config.py", "_images"): _TRANSFORMERS,
    ("calibrate/models/transformers_config.py", "_loss"): _TRANSFORMERS,
    ("catalog/accelerators.py", ""): "figures of vendors: only a second copy of them could differ",
    ("catalog/sources/gpu_memory.py", ""): "figures of vendors: only a second copy of them could differ",
    ("catalog/sources/aws_network.py", ""): "figures of vendors: only a second copy of them could differ",
    ("drawing/canvas.py", ""): "how figures look: sizes and colours",
}

# (path, statement's line of source, replacement): why nothing differs
NO_DIFFERENCE: dict[tuple[str, str, str], str] = {
    (
        "checkpoint/buffers/write_watch.py",
        "self._pagemap, span, 1, mask=_WRITTEN, inverted=_WRITTEN, any_of=_PRESENT | _SWAPPED, returned=_WPALLOWED",
        "(_PRESENT & _SWAPPED)",
    ): "the kernels that tests run on count a page that is not there as written; others may not",
    (
        "checkpoint/determinism/ddp_buckets.py",
        "return torch.stack([parameter.flatten()[:1].sum().to(device, torch.float32) for parameter in trained]).sum()",
        "(1 + 1)",
    ): "any elements will do: the gradients are thrown away, and only the order of their arrival stays",
    (
        "checkpoint/determinism/ddp_buckets.py",
        "return torch.stack([parameter.flatten()[:1].sum().to(device, torch.float32) for parameter in trained]).sum()",
        "(1 - 1)",
    ): "any elements will do, also none: a gradient arrives all the same",
    (
        "fetch/command.py",
        "return 0",
        "None",
    ): "a process that exits with None has the exit code 0",
    (
        "memnode/serving/frame_io.py",
        "self.begun = False  # a frame's first byte was received, and it is not answered yet",
        "True",
    ): "receive() sets it first, and a connection begins with that",
    (
        "plan/search/mixed.py",
        "break",
        "continue",
    ): "programs are sorted by their bound: all that follow would be skipped, too, one by one",
    (
        "plan/search/mixed.py",
        "_MULTIPLIERS = 48  # points of the Lagrangian bound; more exclude no further programs",
        "(48 + 1)",
    ): "a bound of which more points exclude no further programs",
    (
        "plan/search/mixed.py",
        "_MULTIPLIERS = 48  # points of the Lagrangian bound; more exclude no further programs",
        "(48 - 1)",
    ): "a bound of which fewer points exclude a program less, which is then solved in vain",
    (
        "runtime/agent/__main__.py",
        "return 0  # a worker, whose script has ended",
        "None",
    ): "a process that exits with None has the exit code 0",
    (
        "runtime/backends/ec2/launcher.py",
        "start_id: str = field(default_factory=lambda: secrets.token_hex(8))",
        "(8 - 1)",
    ): "a random name of another length differs from those of other starts as well",
    (
        "runtime/backends/ec2/launcher.py",
        "start_id: str = field(default_factory=lambda: secrets.token_hex(8))",
        "(8 + 1)",
    ): "a random name of another length differs from those of other starts as well",
    (
        "runtime/hub/client.py",
        "if time.monotonic() > deadline:",
        "(time.monotonic() >= deadline)",
    ): "a clock of nanoseconds is not read at the deadline itself",
    (
        "runtime/supervise/local_supervisor.py",
        "while not self._stopping_now and time.monotonic() < until_s:",
        "(time.monotonic() <= until_s)",
    ): "a clock of nanoseconds is not read at the deadline itself",
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
