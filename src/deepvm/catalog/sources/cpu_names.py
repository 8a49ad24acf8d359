"""CPU architecture by the name of a machine type: provider, type and accelerator in, x86_64 or arm64 out."""

from __future__ import annotations

import re

from deepvm.catalog import accelerators
from deepvm.catalog.sources import aws_names

# Standard_D4ps_v5, Standard_E8pds_v5, Standard_B2pts_v2: a p in the lower-case letters after the number means Arm.
_AZURE_ARM = re.compile(r"standard_[a-z]+\d+(?:-\d+)?[a-oq-z]*p[a-z]*(?:_|$)")
_GCP_ARM = ("t2a-", "c4a-", "n4a-", "a4x-")  # Tau T2A, Axion, and the hosts of GB200
_OCI_ARM = re.compile(r"(?:vm|bm)\.standard\.a\d")  # Ampere
_ARM_SUPERCHIPS = ("GH200", "GB200", "GB300")  # the G is Grace, an Arm CPU


def architecture_of(provider: str, instance: str, accelerator: str | None) -> str | None:
    """Return x86_64 or arm64; None if neither the provider's names nor the accelerator shows it."""
    gpu = None if accelerator is None else accelerators.find(accelerator)
    if gpu is not None and gpu.name in _ARM_SUPERCHIPS:
        return "arm64"
    name = instance.lower()
    if provider == "aws":
        return aws_names.architecture_of(instance)
    if provider == "azure":
        arm = bool(_AZURE_ARM.match(name))
    elif provider == "gcp":
        arm = name.startswith(_GCP_ARM)
    elif provider == "oci":
        arm = bool(_OCI_ARM.match(name))
    else:
        return None
    return "arm64" if arm else "x86_64"
