"""Which machines an expert would let into a plan: a machine type and a request in, the reason to leave it out out."""

from __future__ import annotations

import numpy as np

from deepvm.catalog import Catalog, Instance
from deepvm.catalog.accelerators import find as find_accelerator
from deepvm.catalog.accelerators import maker_of, spellings
from deepvm.catalog.clouds.burstable import is_burstable
from deepvm.catalog.clouds.ended import is_ended
from deepvm.plan.job_facts import USABLE_GPU_MEMORY
from deepvm.plan.request import ANY_VENDOR, Request
from deepvm.plan.search.board import OS_HEADROOM_GIB, usable_gib
from deepvm.units import format_bytes

DEFAULT_VENDOR = "nvidia"
ENDED = "no longer sold, though the list has a price"
LEAST_VCPUS = 2  # of a memory node


def gpu_memory_gb(instance: Instance) -> float | None:
    """Return the size that its GPU is sold by. For a slice or an unknown GPU, by its bytes: 22.35 GiB are 24 GB."""
    gpu = None if instance.accelerator is None else find_accelerator(instance.accelerator)
    if gpu is not None and instance.accelerator_count % 1 == 0:
        return gpu.marketed_gb
    gib = instance.accelerator_memory_gib
    return None if gib is None else round(gib * 2**30 / 1e9, 1)


class Fitness:
    """``paper`` if the paper's rules apply, which know neither vendors nor burstable machines."""

    def __init__(self, catalog: Catalog, request: Request, *, paper: bool) -> None:
        self._catalog, self._request, self._paper = catalog, request, paper
        self._quotas = request.quotas_of(catalog)
        self._vendors = request.vendors or ((ANY_VENDOR,) if paper else (DEFAULT_VENDOR,))
        named: set[str] = set()
        for name in request.gpus:
            named |= spellings(name, catalog.accelerators)
        self._gpus = named  # the catalogue's spellings of the GPUs asked for

    def worker(self, instance: Instance, eflops: float, gbps: float) -> str | None:
        """Return the reason to leave out a machine with GPUs, None if it may train. NaN means unknown."""
        request = self._request
        if request.gpus and instance.accelerator not in self._gpus:
            return f"another GPU than {' or '.join(request.gpus)}"
        if instance.accelerator_count % 1 and not request.fractional_gpus:
            return "a slice of a GPU (--fractional-gpus admits it)"
        if not self._paper and is_ended(self._catalog.cloud_of(instance), instance.name):
            return ENDED
        foreign = self._foreign(instance)
        if foreign is not None:
            return foreign
        if np.isnan(eflops):
            return "accelerator of unknown speed"
        if np.isnan(gbps):
            return "bandwidth and vCPUs unknown"
        if request.min_gpu_memory_gb is not None:
            marketed_gb = gpu_memory_gb(instance)
            if marketed_gb is None:
                return "GPU memory unknown, and a least one is asked for"
            if marketed_gb < request.min_gpu_memory_gb:
                return f"less than {request.min_gpu_memory_gb:g} GB of GPU memory"
        if not np.isfinite(self.least_nodes(instance)):
            return self._too_small(instance)
        return self._unfit_quota(instance)

    def memory(self, instance: Instance, gbps: float) -> str | None:
        """Return the reason to leave out a machine without GPUs, None if it may keep checkpoints."""
        if not self._paper and is_ended(self._catalog.cloud_of(instance), instance.name):
            return ENDED
        if instance.memory_gib is None:
            return "memory unknown"
        if np.isnan(gbps):
            return "bandwidth and vCPUs unknown"
        if not self._paper:
            if is_burstable(self._catalog.cloud_of(instance), instance.name):
                return "a burstable machine, whose CPU and network credits end"
            if instance.vcpus is not None and instance.vcpus < LEAST_VCPUS:
                return "one vCPU, too few to receive and to check checkpoints at once"
            if usable_gib(instance.memory_gib) <= 0:
                return f"no memory beside the operating system's {OS_HEADROOM_GIB:g} GiB"
        return self._unfit_quota(instance)

    def least_nodes(self, instance: Instance) -> float:
        """Return the fewest machines of a type whose GPUs hold the job; inf if no number of them does."""
        job = self._request.job
        if job is None or instance.accelerator is None:
            return 1.0
        gpus = job.least_gpus(instance.accelerator_memory_gib)
        return float(np.ceil(gpus / max(instance.accelerator_count, 1.0)))

    def _foreign(self, instance: Instance) -> str | None:
        """Return the reason against a GPU's maker. A GPU asked for by its name is never refused."""
        if self._request.gpus or instance.accelerator is None:
            return None
        gpu = find_accelerator(instance.accelerator)
        if gpu is not None and not gpu.pytorch and not self._paper:
            return "a GPU that PyTorch does not support (--gpu admits it)"
        maker = maker_of(instance.accelerator)
        if maker is None or ANY_VENDOR in self._vendors or maker in self._vendors:
            return None
        return f"a GPU of {maker} (--vendor {maker} admits it)"

    def _too_small(self, instance: Instance) -> str:
        job = self._request.job
        assert job is not None  # noqa: S101 - else every GPU would fit
        assert job.whole_bytes is not None  # noqa: S101 - as above
        if instance.accelerator_memory_gib is None:
            return f"GPU memory unknown, and {job.name} needs {format_bytes(job.whole_bytes)}"
        each = " on every GPU, however many share the rest" if job.sharded_bytes else ""
        return f"too little GPU memory: {job.name} needs {format_bytes(job.whole_bytes / USABLE_GPU_MEMORY)}{each}"

    def _unfit_quota(self, instance: Instance) -> str | None:
        if instance.vcpus is None and any(q.closeness(instance) for q in self._quotas):
            return "vCPUs unknown, and a quota counts them"
        return None
