"""The links of one machine type: an instance and its provider in; what joins its GPUs, and the machines, out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepvm.catalog import Instance
from deepvm.catalog.accelerators import PCIE_3_GBYTES_PER_S
from deepvm.catalog.accelerators import find as find_accelerator
from deepvm.catalog.sources.aws_network import has_efa
from deepvm.performance import LinkKind, inside_gbytes_per_s
from deepvm.performance.cluster.interconnect import EFA, INSIDE, PCIE, TCP

# Azure's NC machines have PCIe cards of GPUs that others sell with NVLink.
_PCIE_ONLY = ("standard_nc",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    gpus: float
    inside: LinkKind
    inside_gbytes_per_s: float
    efa: bool

    @property
    def network(self) -> LinkKind:
        return EFA if self.efa else TCP

    @property
    def text(self) -> str:
        """For people: ``8 GPUs over NVLink (231 GB/s), machines over EFA``."""
        if self.gpus <= 1:
            return f"machines over {self.network.name}"
        inside = f"{self.gpus:g} GPUs over {self.inside.name} ({self.inside_gbytes_per_s:.3g} GB/s)"
        return f"{inside}, machines over {self.network.name}"

    def in_ring(self, *, efa: bool) -> Links:
        """Return the links in a ring that has EFA only if all its machines do."""
        return replace(self, efa=self.efa and efa)


def links_of(instance: Instance, provider: str) -> Links:
    """Find a machine's links. An unknown accelerator counts as a card on PCIe 3, the slowest of today's."""
    gpu = None if instance.accelerator is None else find_accelerator(instance.accelerator)
    if gpu is None or (gpu.link != "pcie" and instance.name.lower().startswith(_PCIE_ONLY)):
        kind, sheet_gbytes_per_s = PCIE, PCIE_3_GBYTES_PER_S
    else:
        kind, sheet_gbytes_per_s = INSIDE[gpu.link], gpu.link_gbytes_per_s
    return Links(
        gpus=max(instance.accelerator_count, 1.0),  # a slice is one GPU
        inside=kind,
        inside_gbytes_per_s=inside_gbytes_per_s(kind, sheet_gbytes_per_s),
        efa=provider == "aws" and has_efa(instance.name),
    )
