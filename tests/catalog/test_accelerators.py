"""The table of accelerators: facts that can be cross-checked, and names that people write."""

from __future__ import annotations

from collections import Counter

import pytest

from deepvm.catalog import load
from deepvm.catalog.accelerators import Accelerator, all_accelerators, find
from deepvm.errors import UsageError


def test_table_knows_at_least_35_accelerators() -> None:
    assert len(all_accelerators()) >= 35


def test_no_name_or_alias_means_two_accelerators() -> None:
    spelt = Counter(
        name.lower().replace("-", "").replace(" ", "")
        for gpu in all_accelerators()
        for name in (gpu.name, *gpu.aliases)
    )
    assert [name for name, times in spelt.items() if times > 1] == []
    for gpu in all_accelerators():
        for name in (gpu.name, *gpu.aliases):
            assert find(name) is gpu, name


@pytest.mark.parametrize(
    ("name", "tflops_16bit", "memory_gib", "memory_gbytes_per_s"),
    [
        ("T4", 65, 16, 320),
        ("A10G", 70, 24, 600),
        ("L4", 121, 24, 300),
        ("A100", 312, 40, 1555),
        ("A100-80GB", 312, 80, 2039),
        ("L40S", 362, 48, 864),
        ("H100", 989, 80, 3350),
        ("H200", 989, 141, 4800),
        ("B200", 2250, 179, 8000),
        ("MI300X", 1307, 192, 5300),
    ],
)
def test_data_sheets_are_as_printed(
    name: str, tflops_16bit: float, memory_gib: float, memory_gbytes_per_s: float
) -> None:
    gpu = find(name)
    assert gpu is not None
    assert gpu.name == name
    assert (gpu.tflops_16bit, gpu.memory_gib, gpu.memory_gbytes_per_s) == (
        tflops_16bit,
        memory_gib,
        memory_gbytes_per_s,
    )


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("t4", "T4"),
        ("T4G", "T4g"),
        ("nvidia-tesla-v100", "V100"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("nvidia-h100-mega-80gb", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("rtx-2080-ti", "RTX2080Ti"),
        ("A6000", "RTXA6000"),
        ("Quadro RTX 6000", "RTX6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("nvidia-rtx-pro-6000", "RTXPRO6000"),
        ("RTX PRO 6000 96GB", "RTXPRO6000"),
        ("RTXPRO6000-WK", "RTXPRO6000WS"),
        ("RTX PRO 4500", "RTXPRO4500"),
        ("A100-80G-PCIe", "A100-80GB-PCIe"),
        ("A100-80G-PCIe-NVLink", "A100-80GB-PCIe"),
        ("H100-80G-PCIe", "H100-PCIe"),
        ("H100-80G-PCIe-NVLink", "H100-PCIe"),
        ("H100-80G-SXM5", "H100"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Radeon Pro V520", "Radeon Pro V520"),
    ],
)
def test_a_name_is_found_as_people_and_clouds_write_it(written: str, name: str) -> None:
    gpu = find(written)
    assert gpu is not None
    assert gpu.name == name


@pytest.mark.parametrize("name", ["", "virtual", "A1000000", "Gaudi HL-205", "tpu-v5p", "nvidia"])
def test_what_nobody_knows_is_none(name: str) -> None:
    assert find(name) is None


@pytest.mark.parametrize("catalog", ["aws-2026-08", "paper-aws-2023"])
def test_every_accelerator_of_the_built_in_catalogues_is_known_with_its_memory(catalog: str) -> None:
    instances = [i for i in load(catalog).instances if i.accelerator is not None]
    assert instances
    for instance in instances:
        gpu = find(instance.accelerator or "")
        assert gpu is not None, instance.accelerator
        assert gpu.name == instance.accelerator
        if instance.accelerator_memory_gib is not None:  # clouds print what is left after error correction
            assert gpu.memory_gib == pytest.approx(instance.accelerator_memory_gib, rel=0.08)


def test_rates_are_those_of_whole_generations_and_never_sparse() -> None:
    # No GPU of the table does more than 460 operations per byte of memory traffic; on many of them a rate
    # with sparsity, or one of 8 bits, typed in by mistake would be above that.
    for gpu in all_accelerators():
        assert 5 < gpu.tflops_16bit * 1000 / gpu.memory_gbytes_per_s < 480, gpu.name


@pytest.mark.parametrize(
    ("name", "link", "gbytes_per_s"),
    [
        ("V100", "nvlink", 300),
        ("A100", "nvlink", 600),
        ("A100-80GB", "nvlink", 600),
        ("H100", "nvlink", 900),
        ("H200", "nvlink", 900),
        ("B200", "nvlink", 1800),
        ("T4", "pcie", 32),
        ("A10G", "pcie", 64),
        ("L4", "pcie", 64),
        ("L40S", "pcie", 64),
        ("H100-PCIe", "pcie", 128),
        ("MI300X", "infinity-fabric", 896),
    ],
)
def test_links_between_gpus_are_as_printed(name: str, link: str, gbytes_per_s: float) -> None:
    gpu = find(name)
    assert gpu is not None
    assert (gpu.link, gpu.link_gbytes_per_s) == (link, gbytes_per_s)


def test_cards_have_the_lanes_of_a_generation_and_links_of_a_switch_are_faster() -> None:
    # 16 lanes of PCIe 3, 4 and 5 have 32, 64 and 128 GB/s; some cards have 8, and some share 16 between their GPUs.
    for gpu in all_accelerators():
        if gpu.link == "pcie":
            assert gpu.link_gbytes_per_s in (16, 32, 64, 128), gpu.name
        else:
            assert 200 < gpu.link_gbytes_per_s < gpu.memory_gbytes_per_s, gpu.name
    assert all(gpu.link == "pcie" for gpu in all_accelerators() if "PCIe" in gpu.name or gpu.name.startswith("RTX"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tflops_16bit", 0),
        ("link", "wire"),
        ("link_gbytes_per_s", 0),
        ("memory_gib", -1),
        ("memory_gbytes_per_s", float("nan")),
        ("name", "--"),
    ],
)
def test_a_row_that_cannot_be_is_refused(field: str, value: object) -> None:
    row = {
        "name": "X1",
        "tflops_16bit": 1.0,
        "memory_gib": 1.0,
        "memory_gbytes_per_s": 1.0,
        "marketed_gb": 1.0,
        field: value,
    }
    with pytest.raises(UsageError):
        Accelerator(**row)  # type: ignore[arg-type]
