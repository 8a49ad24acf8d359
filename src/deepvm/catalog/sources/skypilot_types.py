"""The machine types of a SkyPilot file: a row's fields in, an Instance and flags out, parsed once per distinct text."""

from __future__ import annotations

import math

from deepvm.catalog import accelerators
from deepvm.catalog.clouds.google import needs_gpus
from deepvm.catalog.model import Instance
from deepvm.catalog.sources.aws_names import quota_family_of
from deepvm.catalog.sources.cpu_names import architecture_of
from deepvm.catalog.sources.gpu_memory import RowGpu, gpu_of
from deepvm.catalog.sources.skypilot_google import NO_GPUS, NO_HOST

_ARCHITECTURES = {
    "x86_64": "x86_64",
    "x86_64_mac": "x86_64",
    "i386": "x86_64",  # EC2 lists 32-bit first for old types; all run 64-bit too
    "arm64": "arm64",
    "arm64_mac": "arm64",
}

Found = tuple[int, tuple[str, ...]]  # the type's index, and the flags of its row


class InstanceTypes:
    """The types by name. The first row of a type defines it; later rows repeat or contradict it."""

    def __init__(self, provider: str) -> None:
        self.instances: list[Instance] = []
        self.provider = provider
        self._by_fields: dict[tuple[str, ...], Found | str] = {}
        self._by_name: dict[str, int] = {}

    def index_of(self, fields: tuple[str, ...]) -> Found | str:
        """Return the type and flags of a row with these fields, or the reason to leave it out."""
        found = self._by_fields.get(fields)
        if found is None:
            found = self._by_fields[fields] = self._read(fields)
        return found

    def _read(self, fields: tuple[str, ...]) -> Found | str:
        name, accelerator, count_text, vcpus_text, memory_text, gpu_info, arch = (text.strip() for text in fields)
        if not name:
            return NO_HOST
        count, vcpus, memory_gib = _number(count_text), _number(vcpus_text), _number(memory_text)
        for column, value in (("AcceleratorCount", count), ("vCPUs", vcpus), ("MemoryGiB", memory_gib)):
            if value is not None and math.isnan(value):
                return f"a bad number in {column}"
        if bool(accelerator) != bool(count):
            return "an accelerator without a count, or a count without an accelerator"
        if not accelerator and self.provider == "gcp" and needs_gpus(name):
            return NO_GPUS
        if vcpus == 0 or memory_gib == 0:
            return "no vCPUs or no memory"
        aws = self.provider == "aws"
        gpu = gpu_of(self.provider, accelerator, count, gpu_info) if accelerator and count else None
        instance = Instance(
            name=name,
            family=quota_family_of(name) if aws else None,
            vcpus=vcpus,
            memory_gib=memory_gib,
            accelerator=gpu.name if gpu else None,
            accelerator_count=count or 0.0,
            accelerator_memory_gib=gpu.memory_gib if gpu else None,
            architecture=_ARCHITECTURES.get(arch) or architecture_of(self.provider, name, gpu.name if gpu else None),
        )
        return self._match(instance, gpu)

    def _match(self, instance: Instance, gpu: RowGpu | None) -> Found | str:
        flags = _flags(instance, gpu)
        index = self._by_name.get(instance.name)
        if index is None:
            index = self._by_name[instance.name] = len(self.instances)
            self.instances.append(instance)
        elif self.instances[index] != instance:
            first = self.instances[index]
            if (first.accelerator, first.accelerator_count) != (instance.accelerator, instance.accelerator_count):
                return "another accelerator than in earlier rows of the type"
            flags.append("contradicts earlier rows of the type (the first counts)")
        return index, tuple(flags)


def _flags(instance: Instance, gpu: RowGpu | None) -> list[str]:
    if gpu is None:
        return []
    flags = []
    if not float(instance.accelerator_count).is_integer():
        flags.append("a fraction of an accelerator")
    if accelerators.find(gpu.name) is None:
        flags.append("accelerator not in the table of accelerators")
    return [*flags, *gpu.flags]


def _number(text: str) -> float | None:
    """Parse a number of zero or more; None if absent, NaN if invalid."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) and value >= 0 else math.nan
