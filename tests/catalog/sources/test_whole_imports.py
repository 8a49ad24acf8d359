"""Whole imports of SkyPilot's files: the catalogue, byte for byte, and what became of every row."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from deepvm.catalog import files
from deepvm.catalog.clouds.google import gpus_of, needs_gpus, sustained_gbps
from deepvm.catalog.sources import skypilot
from deepvm.errors import MalformedFile, UnknownName
from tests.support.golden import same_as_file

EXPECTED = Path(__file__).with_name("expected")
HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"
AWS = f"""{HEADER}
g4dn.xlarge,T4,1,4,16,,0.526,0.1578,us-east-1,us-east-1a
g4dn.xlarge,T4,1,4,16,,0.526,0.2,us-east-1,us-east-1b

g4dn.xlarge,T4,1,4,16,,0.53,0.3,us-east-1,us-east-1a
c5.xlarge,,,4,8,,0.17,,us-east-1,
c5.xlarge,,,4,8,,,0.07,us-west-2,us-west-2a
c5.xlarge,,,4,8,,0,0.07,us-west-2,us-west-2b
c5.xlarge,,,4,8,,0.17,0.00,us-west-2,us-west-2c
c5.xlarge,,,4,8,,0.17,0.17,us-west-2,us-west-2d
c5.xlarge,,,4,8,,0.17,0.16,us-west-2,us-west-2e
c5.xlarge,,,4,8,,,,us-west-2,us-west-2f
c5.xlarge,,,4,8,,0,0,us-west-2,us-west-2f
c5.xlarge,,,4,8,,-1,0.1,us-west-2,us-west-2f
c5.xlarge,,,4,8,,inf,0.1,us-west-2,us-west-2f
c5.xlarge,,,4,8,,nan,0.1,us-west-2,us-west-2f
c5.xlarge,,,4,8,,0.17,cheap,us-west-2,us-west-2f
c5.xlarge,,,4,8,,0.17,0.1,,a
c5.xlarge,,,4,8,,0.17,0.1,us/west,a
c5.xlarge,,,4,8,,0.17
c5.xlarge,,,4,8,,0.17,0.1,us-west-2,a,b
,T4,1,4,16,,0.5,0.1,us-east-1,a
odd.xlarge,Unheard,2,8,32,,1,0.5,us-east-1,a
odd.2xlarge,T4,many,8,32,,1,0.5,us-east-1,a
odd.4xlarge,T4,1,,,,1,0.5,us-east-1,a
odd.8xlarge,T4,1,-4,16,,1,0.5,us-east-1,a
p4d.24xlarge,A100,8,96,1152,,32.77,9.8,us-east-1,a
"""
GCP = f"""{HEADER}
n1-standard-4,,,4,15,,0.19,0.04,us-central1,us-central1-a
n1-standard-8,,,8,30,,0.38,0.08,us-central1,us-central1-a
,T4,1,,,,0.35,0.11,us-central1,us-central1-a
,T4,2,,,,0.7,,us-central1,us-central1-a
,V100,1,,,,2.48,x,us-central1,us-central1-a
a2-highgpu-1g,,,12,85,,0.9,0.3,us-central1,us-central1-a
,A100,1,,,,2.9,1.1,us-central1,us-central1-a
a2-highgpu-2g,,,24,170,,1.8,0.6,us-central1,us-central1-a
g2-standard-4,,,4,16,,0.3,0.1,us-central1,us-central1-b
,L4,1,,,,0.5,0.2,us-central1,us-central1-a
,TPU-V3,1,,,,4,2,us-central1,us-central1-a
n2-standard-4,,,4,16,,0.2,0.05,us-central1,us-central1-a
"""


@pytest.mark.parametrize(
    ("name", "content", "provider", "region"),
    [("aws", AWS, "aws", None), ("aws-west", AWS, "aws", "us-west-2"), ("azure", AWS, "azure", None),
     ("gcp", GCP, "gcp", None)],
)  # fmt: skip
def test_every_row_is_read_or_left_out_for_a_reason(name: str, content: str, provider: str, region: str | None) -> None:
    catalog, report = skypilot.parse(
        content.encode(), "vms.csv", provider=provider, name=name, seen=date(2026, 8, 22), region=region, origin="v.csv"
    )
    text = f"{files.dumps(catalog)}\n{json.dumps(report.to_json(), indent=1)}"
    same_as_file(text, EXPECTED / f"{name}.txt")


@pytest.mark.parametrize(
    ("content", "line", "told"),
    [
        (f"{HEADER}\n", 1, "no rows follow the column names"),
        (f"{HEADER}\n\n,,,,,,x,,r,\n", 3, "no row can be used: a price that is not an amount of zero or more"),
        (HEADER.replace("Region", "Price"), 1, "it has no column Region"),
        (f"{HEADER},Price\n", 1, "the column Price is there twice: remove one"),
        (f"{HEADER}, Arch ,Arch\n", 1, "the column Arch is there twice: remove one"),
        (f"{HEADER}\na\nb\0\n", 3, "not a text file"),
        (f'{HEADER}\n\n"a"b,,\n', 3, "not valid CSV"),
        (" \n", 1, "the file is empty"),
    ],
)
def test_a_file_that_is_no_catalogue_is_named_with_its_line(content: str, line: int, told: str) -> None:
    with pytest.raises(MalformedFile) as refused:
        skypilot.parse(content.encode(), "vms.csv", provider="aws", name="x", seen=date(2026, 8, 22), origin="v.csv")
    assert told in str(refused.value)
    assert f"line {line}" in str(refused.value)


def test_a_region_that_the_file_lacks_is_told_with_those_it_has() -> None:
    with pytest.raises(UnknownName, match="no region of this file is called 'us-west-3': did you mean us-west-2"):
        skypilot.parse(
            AWS.encode(), "v", provider="aws", name="x", seen=date(2026, 8, 22), region="us-west-3", origin="v.csv"
        )


def test_googles_hosts_have_their_gpus_and_bandwidths() -> None:
    counts = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 384)
    hosts = [f"n1-standard-{n}" for n in counts]
    for series in ("a2-highgpu", "a2-megagpu", "a2-ultragpu", "a3-highgpu", "a3-megagpu", "a3-ultragpu", "a4-highgpu"):
        hosts += [f"{series}-{n}g" for n in (1, 2, 4, 8, 16)]
    hosts += [f"{series}-{n}" for series in ("g2-standard", "g4-standard", "n2-standard") for n in counts]
    hosts += ["a9-highgpu-1g", "n1-standard-4x", "a2-highgpu-1", "n1-highmem-8", "a3x-1", "g2", ""]
    rows = [f"{host}: {gpus_of(host)} {sustained_gbps(host)} {needs_gpus(host)}" for host in hosts]
    same_as_file("\n".join(rows), EXPECTED / "google-hosts.txt")


def test_names_and_descriptions_of_imports() -> None:
    assert skypilot.default_name("aws") == "skypilot-aws"
    assert skypilot.default_name("aws", "us east/1") == "skypilot-aws-us-east-1"
    assert skypilot.description("aws", "v.csv", None) == "SkyPilot's catalogue of aws, from v.csv."
    assert skypilot.description("aws", "v.csv", "r") == "SkyPilot's catalogue of aws in r, from v.csv."
