"""Sustained bandwidth by family: as EC2 documents it, or below, never above."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from deepvm import plan as planning
from deepvm.catalog import Catalog, load
from deepvm.catalog.sources import skypilot
from deepvm.catalog.sources.aws_network import has_efa, sustained_by_family
from deepvm.plan.search.instances import analyse_instances

BURSTABLE = {
    "nano": 0.032,
    "micro": 0.064,
    "small": 0.128,
    "medium": 0.256,
    "large": 0.512,
    "xlarge": 1.024,
    "2xlarge": 2.048,
}


@pytest.mark.parametrize("series", ["t3", "t3a", "t4g"])
@pytest.mark.parametrize(("size", "gbps"), BURSTABLE.items())
def test_burstable_types_sustain_what_ec2_documents(series: str, size: str, gbps: float) -> None:
    assert sustained_by_family(f"{series}.{size}", 2) == gbps


@pytest.mark.parametrize(
    ("instance", "gbps"),
    [("p4d.24xlarge", 400), ("p5.48xlarge", 3200), ("p5en.48xlarge", 3200), ("trn1.32xlarge", 800), ("g5.xlarge", 2.5)],
)
def test_machines_with_efa_have_all_their_cards(instance: str, gbps: float) -> None:
    assert sustained_by_family(instance, 96) == gbps


def test_the_built_in_catalogue_sustains_at_least_what_the_families_tell() -> None:
    for instance in load("aws-2026-08").instances:
        told = sustained_by_family(instance.name, instance.vcpus)
        assert told is not None
        assert instance.sustained_gbps is not None
        assert 0.4 * instance.sustained_gbps <= told <= 1.001 * instance.sustained_gbps, instance.name


def test_no_type_of_ec2_sustains_more_than_it_does() -> None:
    """Against what EC2 says of all its types, as moto plays it back."""
    moto = pytest.importorskip("moto")
    described = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
    if not described.is_file():
        pytest.skip("this moto keeps its instance types elsewhere")
    ratios = []
    for name, row in json.loads(gzip.decompress(described.read_bytes())).items():
        cards = [card.get("BaselineBandwidthInGbps") for card in row.get("NetworkInfo", {}).get("NetworkCards", [])]
        told = sustained_by_family(name, row["VCpuInfo"]["DefaultVCpus"])
        if cards and all(cards) and told is not None:
            assert told <= sum(cards) * 1.005, name
            ratios.append(told / sum(cards))
    assert len(ratios) > 1000
    assert sorted(ratios)[len(ratios) // 2] > 0.75


def test_a_type_that_nobody_knows_gets_little_and_one_without_vcpus_nothing() -> None:
    assert sustained_by_family("q9.xlarge", 4) == pytest.approx(0.4)
    assert sustained_by_family("q9.xlarge", None) is None


def test_plans_count_on_the_family_and_mark_it(small: Catalog) -> None:
    board = analyse_instances(small, planning.Request(budget_usd=3))
    assert dict(zip(board.memory.instance.tolist(), board.memory.gbps.tolist(), strict=True)) == {1: 0.5}
    best = planning.plan(small, planning.Request(budget_usd=3, checkpoint_bytes=300_000_000)).recommendations[0]
    workers, memory = best.roles
    assert workers.instance == "p4d.24xlarge"
    assert (memory.instance, memory.count) == ("c5.large", 1)
    assert "bandwidth of c5.large (by its family)" in best.estimates
    assert board.workers.gbps.tolist() == [400]


@pytest.fixture
def small() -> Catalog:
    """Three types of SkyPilot's file, which tells no bandwidth."""
    rows = (
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone",
        "p4d.24xlarge,A100,8,96,1152,,9,1.5,r1,a",
        "c5.large,,,2,4,,0.085,0.03,r1,a",
        "t3.large,,,2,8,,0.0832,0.03,r1,a",
    )
    content = "\n".join(rows).encode()
    known = skypilot.parse(content, "x", provider="aws", name="x", seen=date(2026, 8, 22), origin="x")[0]
    bare = tuple(replace(i, sustained_gbps=None, burst_gbps=None) for i in known.instances)
    return replace(known, instances=bare)


@pytest.mark.parametrize(
    ("name", "efa"),
    [
        ("g4dn.xlarge", False),
        ("g4dn.4xlarge", False),
        ("g4dn.8xlarge", True),
        ("g4dn.metal", True),
        ("g5.4xlarge", False),
        ("g5.48xlarge", True),
        ("G6E.8xlarge", True),
        ("p3.16xlarge", False),
        ("p3dn.24xlarge", True),
        ("p4d.24xlarge", True),
        ("p5.4xlarge", True),
        ("p5.8xlarge", False),
        ("p6-b200.48xlarge", True),
        ("trn1.2xlarge", False),
        ("c5n.18xlarge", False),  # only accelerated types are asked
        ("", False),
    ],
)
def test_efa_is_known_by_the_name(name: str, efa: bool) -> None:
    assert has_efa(name) is efa
