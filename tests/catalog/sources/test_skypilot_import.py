"""SkyPilot's CSV: every row is accounted for, nothing missing is made up, a large file is read at once."""

import contextlib
import os
import random
from datetime import date

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deepvm.catalog import Market, files, library
from deepvm.catalog.sources import skypilot
from deepvm.catalog.sources.aws_names import architecture_of, family_of, quota_family_of
from deepvm.catalog.update import import_file
from deepvm.errors import DeepvmError, MalformedFile, UnknownName, UsageError

DAY = date(2026, 8, 22)
HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"


def gpu_info(name, mib, count=1.0):
    return (
        f"\"{{'Gpus': [{{'Name': '{name}', 'Manufacturer': 'NVIDIA', 'Count': {count}, "
        f"'MemoryInfo': {{'SizeInMiB': {mib}}}}}], 'TotalGpuMemoryInMiB': {mib}}}\""
    )


T4 = gpu_info("T4", 16384)


def parse(*rows, header=HEADER, provider="aws", region=None):
    content = "\n".join((header, *rows)).encode()
    return skypilot.parse(content, "vms.csv", provider=provider, name="x", seen=DAY, region=region, origin="vms.csv")


def reasons(tallies):
    return {tally.reason: (tally.rows, tally.first_line) for tally in tallies}


def offers(catalog):
    return [(o.instance.name, o.region, o.zone, o.market.value, o.usd_per_hour) for o in catalog.offers()]


def test_a_row_becomes_an_offer_in_each_market():
    catalog, report = parse(f"g4dn.xlarge,T4,1.0,4.0,16.0,{T4},0.526,0.1578,us-east-1,use1-az1")
    assert offers(catalog) == [
        ("g4dn.xlarge", "us-east-1", "use1-az1", "on-demand", 0.526),
        ("g4dn.xlarge", "us-east-1", "use1-az1", "spot", 0.1578),
    ]
    machine = catalog.instance("g4dn.xlarge")
    assert (machine.vcpus, machine.memory_gib, machine.accelerator) == (4, 16, "T4")
    assert (machine.accelerator_count, machine.accelerator_memory_gib) == (1, 16)
    assert catalog.prices_seen == (DAY, DAY)
    assert (report.rows, report.kept, report.types, report.offers) == (1, 1, 1, 2)
    assert report.flagged == report.left_out == ()


def test_columns_are_found_by_name_whatever_their_order():
    header = "Arch,Region,Price,MemoryGiB,vCPUs,Nonsense,AcceleratorCount,AcceleratorName,InstanceType"
    catalog, report = parse("arm64,us-east-1,0.2,8,4,hello,,,c5.xlarge", header=header)
    assert offers(catalog) == [("c5.xlarge", "us-east-1", None, "on-demand", 0.2)]
    assert catalog.instance("c5.xlarge").architecture == "arm64"
    assert catalog.instance("c5.xlarge").family == "C"
    assert reasons(report.flagged) == {"no spot price": (1, 2)}


def test_known_aws_types_get_bandwidth_and_interruptions_from_the_built_in_catalogue():
    rows = ("c5.xlarge,,,4,8,,0.17,0.07,us-east-1,a", "c5.large,,,2,4,,0.08,0.03,us-east-1,a")
    catalog, report = parse(*rows)
    assert report.completed_types == 1
    assert catalog.instance("c5.xlarge").sustained_gbps == 1.25
    assert catalog.instance("c5.xlarge").interruption_percent == (0, 5)
    assert catalog.instance("c5.large").gbps is None
    assert "1 types are from aws-2026-08" in catalog.notes[0]
    elsewhere, report = parse(*rows, provider="gcp")
    assert report.completed_types == 0
    machine = elsewhere.instance("c5.xlarge")
    assert (machine.gbps, machine.architecture, machine.family) == (None, "x86_64", None)


def test_awkward_rows_are_kept_and_flagged():
    catalog, report = parse(
        f"g4dn.xlarge,T4,1,4,16,{T4},0.5,0.6,r1,a",
        f"g4dn.xlarge,T4,1,4,16,{T4},0.5,0.5,r1,b",
        f"g4dn.xlarge,T4,1,4,16,{T4},0.5,,r1,c",
        f"g4dn.xlarge,T4,1,4,16,{T4},,0.2,r1,d",
        f"g6f.large,L4,0.125,2,8,{gpu_info('L4', 2861)},0.2,0.1,r1,a",
        "x1.abacus,Abacus,2,4,16,,1,0.5,r1,a",
        f"g4dn.xlarge,T4,1,8,16,{T4},0.5,0.2,r1,e",
    )
    assert report.kept == 7
    assert reasons(report.flagged) == {
        "spot at or above on-demand": (2, 2),
        "no spot price": (1, 4),
        "no on-demand price": (1, 5),
        "a fraction of an accelerator": (1, 6),
        "accelerator not in the table of accelerators": (1, 7),
        "memory of the accelerator unknown": (1, 7),
        "contradicts earlier rows of the type (the first counts)": (1, 8),
    }
    assert catalog.instance("g6f.large").accelerator_count == 0.125
    assert catalog.instance("g4dn.xlarge").vcpus == 4
    assert catalog.instance("x1.abacus").accelerator_memory_gib is None


def test_unusable_rows_are_left_out_with_a_reason_and_their_line():
    good = "c5.xlarge,,,4,8,,0.17,0.07,us-east-1,a"
    catalog, report = parse(
        good,
        ",tpu-v6e-16,1,,,tpu-v6e-16,51.84,36.32,r1,a",
        "c5.large,,,four,4,,0.08,0.03,r1,a",
        "c5.large,,,2,-4,,0.08,0.03,r1,a",
        "c5.large,,,2,4,,cheap,0.03,r1,a",
        "c5.large,,,2,4,,0.08,nan,r1,a",
        "c5.large,,,2,4,,-0.08,0.03,r1,a",
        "c5.large,,,2,4,,inf,0.03,r1,a",
        "c5.large,,,2,4,,,,r1,a",
        "c5.large,,,2,4,,0.08,0.03,,a",
        "c5.large,,,2,4,,0.08,0.03,r1/r2,a",
        "g9.large,T4,,2,4,,0.08,0.03,r1,a",
        "g9.large,,1,2,4,,0.08,0.03,r1,a",
        "g9.large,T4,0,2,4,,0.08,0.03,r1,a",
        "c5.large,,,2,0,,0.08,0.03,r1,a",
        "c5.large,,,2,4,,0.08",
        "c5.large,,,2,4,,0.08,0.03,r1,a,b,c",
        good,
        "c5.xlarge,T4,1,4,8,,0.17,0.07,us-east-1,b",
        "",
    )
    assert offers(catalog) == [
        ("c5.xlarge", "us-east-1", "a", "on-demand", 0.17),
        ("c5.xlarge", "us-east-1", "a", "spot", 0.07),
    ]
    assert (report.rows, report.kept) == (19, 1)
    assert reasons(report.left_out) == {
        "a price that is not an amount of zero or more": (4, 6),
        "an accelerator without a count, or a count without an accelerator": (3, 13),
        "no region, or one with a slash in its name": (2, 11),
        "not as many fields as the header has": (2, 17),
        "no instance type: an accelerator priced without its host": (1, 3),
        "a bad number in vCPUs": (1, 4),
        "a bad number in MemoryGiB": (1, 5),
        "no price at all": (1, 10),
        "no vCPUs or no memory": (1, 16),
        "the same type and place as an earlier row": (1, 19),
        "another accelerator than in earlier rows of the type": (1, 20),
    }
    assert catalog.places == (("us-east-1", "a"),)  # a row left out leaves nothing behind


def test_a_price_of_zero_is_no_price_and_the_row_stays():
    catalog, report = parse(
        "vast.1,,,4,8,,0.44,0.00,r1,a",
        "vast.2,,,4,8,,0,0.03,r1,a",
        "vast.3,,,4,8,,0.0,0,r1,a",
    )
    assert offers(catalog) == [("vast.1", "r1", "a", "on-demand", 0.44), ("vast.2", "r1", "a", "spot", 0.03)]
    assert reasons(report.flagged) == {
        "spot price of zero (read as missing)": (1, 2),
        "no spot price": (1, 2),
        "on-demand price of zero (read as missing)": (1, 3),
        "no on-demand price": (1, 3),
    }
    assert reasons(report.left_out) == {"no price at all": (1, 4)}


def described(name, mib, total=None):
    total = "" if total is None else f", 'TotalGpuMemoryInMiB': {total}"
    return f"\"{{'Gpus': [{{'Name': '{name}', 'MemoryInfo': {{'SizeInMiB': {mib}}}}}]{total}}}\""


@pytest.mark.parametrize(
    ("provider", "accelerator", "count", "info", "name", "gib", "flag"),
    [
        ("aws", "A10G", 1, described("A10G", 22888), "A10G", 22.352, None),
        ("runpod", "A100-80GB", 1, described("A100 PCIe", 80, 80), "A100-80GB", 80, "in GiB"),
        ("runpod", "A100-80GB", 8, described("A100 PCIe", 80, 640), "A100-80GB", 80, "in GiB"),
        ("shadeform", "L4", 2, described("L4", 24), "L4", 24, "in GiB"),
        ("runpod", "RTXPRO6000-WK", 1, described("x", 96), "RTXPRO6000-WK", 96, "in GiB"),
        ("runpod", "PRO-6000-MIG-24GB", 2, described("x", 24, 48), "PRO-6000-MIG-24GB", 24, "in GiB"),
        ("primeintellect", "A100-80GB", 8, described("A100", 655360, 5242880), "A100-80GB", 80, "the sum"),
        ("primeintellect", "A100", 8, described("A100", 327680, 2621440), "A100", 40, "the sum"),
        ("primeintellect", "A100", 2, described("A100", 81920, 163840), "A100", 40, "the sum"),
        ("vast", "H100", 4, described("H100", 326236, 326236), "H100", 80, "the sum"),
        ("vast", "A100", 2, described("A100", 81920, 81920), "A100", 40, "the sum"),
        ("vast", "A100", 2, described("A100", 163840, 163840), "A100-80GB", 80, "named like another"),
        ("vast", "H100", 1, described("H100", 95830, 95830), "H100-NVL", 94, "named like another"),
        ("cudo", "A100", 2, described("A100", 81920, 163840), "A100-80GB", 80, "named like another"),
        ("azure", "A100-80GB", 8, "", "A100-80GB", 80, "missing"),
        ("ibm", "V100", 1, "V100", "V100", 16, "missing"),
        ("hyperstack", "A100-80G-PCIe", 4, "\"{'Gpus': [{'Manufacturer': null}]}\"", "A100-80G-PCIe", 80, "missing"),
        ("nebius", "RTX6000", 1, described("RTX6000", 98304, 98304), "RTXPRO6000", 96, None),
        ("nebius", "RTX6000", 1, "", "RTXPRO6000", 96, "missing"),
        ("lambda", "RTX6000", 1, described("RTX6000", 24576, 24576), "RTX6000", 24, None),
        ("x", "T4", 1, described("T4", 99999), "T4", 16, "disagrees"),
        ("aws", "L4", 0.125, described("L4", 2861), "L4", 2.794, None),
        ("azure", "A10", 0.5, "", "A10", 12, "missing"),
        ("x", "Abacus", 1, described("Abacus", 0.5), "Abacus", None, "unknown"),
    ],
)  # fmt: skip
def test_the_table_of_accelerators_decides_about_memory(provider, accelerator, count, info, name, gib, flag):
    catalog, report = parse(f"m,{accelerator},{count},4,16,{info},0.5,0.2,r1,a", provider=provider)
    machine = catalog.instance("m")
    assert (machine.accelerator, machine.accelerator_memory_gib) == (name, pytest.approx(gib, abs=0.001))
    about = [r for r in reasons(report.flagged) if "memory" in r]
    assert (flag is None and about == []) or any(flag in reason for reason in about)


@pytest.mark.parametrize(
    ("provider", "arm64", "x86_64"),
    [
        (
            "azure",
            ["Standard_D4ps_v5", "Standard_D2pls_v5", "Standard_D8plds_v5", "Standard_E4pds_v5", "Standard_B2pts_v2",
             "Standard_E16ps_v6"],
            ["Standard_D4s_v5", "Standard_NP10s", "Standard_E4-2as_v5", "Standard_FX4mds", "Standard_D2_v2_Promo",
             "Standard_DC4ads_cc_v5", "Basic_A0", "Standard_ND96isr_H100_v5"],
        ),
        ("gcp", ["t2a-standard-4", "c4a-highmem-8", "n4a-standard-2"], ["c4-standard-4", "t2d-standard-1"]),
        ("oci", ["VM.Standard.A1.Flex$_2_8", "BM.Standard.A1.160"], ["VM.Standard.E4.Flex$_2_8", "VM.Standard2.4"]),
        ("aws", ["c6g.xlarge", "a1.metal"], ["c6i.xlarge", "g4dn.xlarge"]),
    ],
)  # fmt: skip
def test_names_tell_the_cpu_architecture_of_every_large_cloud(provider, arm64, x86_64):
    rows = [f"{name},,,4,16,,0.2,0.1,r1,a" for name in (*arm64, *x86_64)]
    catalog, _ = parse(*rows, provider=provider)
    assert {i.name: i.architecture for i in catalog.instances} == {
        **dict.fromkeys(arm64, "arm64"),
        **dict.fromkeys(x86_64, "x86_64"),
    }


def test_machines_with_grace_are_arm_whoever_has_them():
    catalog, _ = parse("gpu_1x_gh200,GH200,1,64,432,,2.29,,r1,a", "n,H100,1,4,8,,2,,r1,a", provider="lambda")
    assert [i.architecture for i in catalog.instances] == ["arm64", None]


def test_google_hosts_and_their_accelerators_become_machines():
    catalog, report = parse(
        "a2-highgpu-8g,,,96,680,,5.9,2.3,us-central1,us-central1-a",
        f",A100,8,,,{gpu_info('A100', 40960)},23.4,9.1,us-central1,us-central1-a",
        "g2-standard-24,,,24,96,,0.88,0.35,us-central1,us-central1-a",
        f",L4,2,,,{gpu_info('L4', 23034)},1.12,,us-central1,us-central1-a",
        f",L4,1,,,{gpu_info('L4', 23034)},0.56,0.22,us-central1,us-central1-a",
        "n1-standard-8,,,8,30,,0.38,0.08,us-central1,us-central1-a",
        f",T4,1,,,{T4},0.35,0.14,us-central1,us-central1-a",
        f",T4,2,,,{T4},0.70,0.28,us-central1,us-central1-b",
        ",tpu-v6e-8,1,,,,2.7,1.2,us-central1,us-central1-a",
        "a3-edgegpu-8g,,,208,1872,,9.4,2.1,us-central1,us-central1-a",
        provider="gcp",
    )
    place = ("us-central1", "us-central1-a")
    assert sorted(offers(catalog)) == [
        ("a2-highgpu-8g", *place, "on-demand", 29.3),
        ("a2-highgpu-8g", *place, "spot", 11.4),
        ("g2-standard-24", *place, "on-demand", 2.0),  # its GPUs have no spot price
        ("n1-standard-8", *place, "on-demand", 0.38),
        ("n1-standard-8", *place, "spot", 0.08),
        ("n1-standard-8+T4:1", *place, "on-demand", 0.73),
        ("n1-standard-8+T4:1", *place, "spot", 0.22),
    ]
    machine = catalog.instance("a2-highgpu-8g")
    assert (machine.accelerator, machine.accelerator_count, machine.accelerator_memory_gib) == ("A100", 8, 40)
    assert (machine.vcpus, machine.memory_gib, machine.gbps) == (96, 680, 100)
    assert catalog.instance("n1-standard-8+T4:1").gbps == 16
    assert catalog.instance("n1-standard-8").gbps is None
    assert (report.rows, report.kept, report.completed_types) == (10, 6, 3)
    assert reasons(report.left_out) == {
        "no instance type: an accelerator priced without its host": (3, 6),
        "a host whose price leaves out its accelerators": (1, 11),
    }


def test_a_half_with_a_bad_price_makes_no_machine():
    host, gpus = "a2-highgpu-1g,,,12,85,,0.7,0.3,r1,a", f",A100,1,,,{gpu_info('A100', 40960)},-3,1.1,r1,a"
    machine = "c2-standard-4,,,4,16,,0.2,0.1,r1,a"
    catalog, report = parse(machine, host, gpus, provider="gcp")
    assert [i.name for i in catalog.instances] == ["c2-standard-4"]
    assert "a price that is not an amount of zero or more" in reasons(report.left_out)


def test_a_host_without_its_accelerators_is_no_bargain():
    with pytest.raises(MalformedFile, match="leaves out its accelerators"):
        parse("a2-highgpu-8g,,,96,680,,5.9,2.3,us-central1,us-central1-a", provider="gcp")


def test_one_region_can_be_asked_for():
    rows = ("c5.xlarge,,,4,8,,0.17,0.07,us-east-1,a", "c5.xlarge,,,4,8,,0.2,0.07,eu-west-1,a")
    catalog, report = parse(*rows, region="eu-west-1")
    assert catalog.regions == ["eu-west-1"]
    assert reasons(report.left_out) == {"in another region than asked": (1, 2)}
    with pytest.raises(UnknownName, match="did you mean eu-west-1"):
        parse(*rows, region="eu-west-2")


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        (T4, 16),
        ("\"{'Gpus': [{'Name': 'A10G', 'MemoryInfo': {'SizeInMiB': 22888}}]}\"", 22.352),
        ("\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': 16384}}], 'TotalGpuMemoryInMiB': 'lots'}\"", 16),
        ("tpu-v6e-16", None),
        ("__import__('os').system('true')", None),
        ("\"{'Gpus': []}\"", None),
        ("\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': -1}}]}\"", None),
        ("\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': True}}]}\"", None),
        ("\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': '16384'}}]}\"", None),
        ("\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': 1e-9}}]}\"", None),
        (T4.replace(", ", "," + " " * 2000), None),
        ("(" * 2000, None),
        ("\"{'Gpus': " + "[" * 5000 + '"', None),
        ("0x1for x in y", None),
    ],
)
def test_gpu_memory_comes_from_a_literal_and_from_nothing_else(text, gib):
    catalog, _ = parse(f"x1.abacus,Abacus,1,4,16,{text},0.5,0.2,r1,a")
    assert catalog.instance("x1.abacus").accelerator_memory_gib == (
        None if gib is None else pytest.approx(gib, abs=1e-3)
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "line 1: the file is empty"),
        (b" \n\n", "line 1: the file is empty"),
        (b"PK\x03\x04\0\0\n\0", "line 1: not a text file"),
        (HEADER.encode() + b"\n" + b"c5,\xff\n", "line 2: not UTF-8 text"),
        (HEADER.encode(), "line 1: no rows follow the column names"),
        (b"a,b,c\n1,2,3\n", "line 1: not a SkyPilot catalogue: it has no column InstanceType, AcceleratorName"),
        (HEADER.replace("Region", "Where").encode(), "it has no column Region"),
        ((HEADER + ",Price\n").encode(), "the column Price is there twice"),
        ((HEADER + '\nc5.xlarge,"oops').encode(), "line 2: not valid CSV"),
        ((HEADER + "\n" + "x" * 200_000).encode(), "line 2: not valid CSV"),
        ((HEADER + "\nc5.xlarge,,,4,8,,?,?,r1,a\n").encode(), "line 2: no row can be used: a price"),
        (b'{"format": "deepvm-catalog/1"}', "not a SkyPilot catalogue"),
    ],
)
def test_a_file_that_is_none_is_named_with_its_line(tmp_path, content, told):
    (tmp_path / "vms.csv").write_bytes(content)
    with pytest.raises(MalformedFile) as caught:
        skypilot.read(tmp_path / "vms.csv", provider="aws", name="x")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_and_windows_line_ends_are_no_problem():
    content = b"\xef\xbb\xbf" + HEADER.encode() + b"\r\nc5.xlarge,,,4,8,,0.17,0.07,r1,a\r\n"
    catalog, _ = skypilot.parse(content, "x", provider="aws", name="x", seen=DAY, origin="x")
    assert len(catalog.instances) == 1


def test_a_folder_or_an_absent_file_is_reported(tmp_path):
    for path in (tmp_path, tmp_path / "absent.csv"):
        with pytest.raises(MalformedFile, match="cannot be read"):
            skypilot.read(path, provider="aws", name="x")


def test_a_file_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(skypilot, "MAX_BYTES", 10)
    (tmp_path / "vms.csv").write_text(HEADER)
    with pytest.raises(MalformedFile, match="at most"):
        skypilot.read(tmp_path / "vms.csv", provider="aws", name="x")


def test_prices_are_as_old_as_the_file_unless_a_day_is_given(tmp_path):
    path = tmp_path / "vms.csv"
    path.write_text(f"{HEADER}\nc5.xlarge,,,4,8,,0.17,0.07,r1,a\n")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    catalog, _ = skypilot.read(path, provider="aws", name="x")
    assert catalog.prices_seen == (date(2023, 11, 14), date(2023, 11, 14))
    catalog, _ = skypilot.read(path, provider="aws", name="x", seen=DAY)
    assert catalog.prices_seen == (DAY, DAY)


cells = st.sampled_from(
    [
        "",
        "c5.xlarge",
        "g4dn.xlarge",
        "T4",
        "1.0",
        "4",
        "0.5",
        "nan",
        "-1",
        "1e999",
        "us-east-1",
        "a",
        T4,
        "'",
        '"',
        "\0",
    ]
) | st.text(max_size=6)


@given(st.lists(st.lists(cells, max_size=11).map(",".join), max_size=6), st.sampled_from(["aws", "gcp"]))
@settings(max_examples=300, deadline=None)
def test_garbage_in_rows_gives_a_catalogue_or_an_error_of_ours(rows, provider):
    with contextlib.suppress(DeepvmError):
        catalog, report = parse(*rows, provider=provider)
        assert report.kept >= 1
        again = files.parse(files.dumps(catalog), "again")
        assert offers(again) == offers(catalog)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass")))
@settings(max_examples=300, deadline=None)
def test_garbage_files_give_an_error_of_ours(content):
    for text in (content, HEADER.encode() + b"\n" + content):
        with contextlib.suppress(DeepvmError):
            skypilot.parse(text, "x", provider="aws", name="x", seen=DAY, origin="x")


@pytest.mark.parametrize(
    ("name", "architecture", "family"),
    [
        ("g5g.xlarge", "arm64", "G"),
        ("c6g.large", "arm64", "C"),
        ("m7gd.metal", "arm64", "M"),
        ("im4gn.large", "arm64", "IM"),
        ("is4gen.large", "arm64", "IS"),
        ("t4g.nano", "arm64", "T"),
        ("a1.medium", "arm64", "A"),
        ("mac2-m2.metal", "arm64", "MAC"),
        ("p6e-gb200.36xlarge", "arm64", "P"),
        ("hpc7g.16xlarge", "arm64", "HPC"),
        ("mac1.metal", "x86_64", "MAC"),
        ("g4dn.xlarge", "x86_64", "G"),
        ("gr6.4xlarge", "x86_64", "GR"),
        ("c7i-flex.large", "x86_64", "C"),
        ("p6-b200.48xlarge", "x86_64", "P"),
        ("u-6tb1.metal", "x86_64", "U"),
        ("trn1.2xlarge", "x86_64", "TRN"),
    ],
)
def test_aws_names_tell_architecture_and_family(name, architecture, family):
    assert (architecture_of(name), family_of(name)) == (architecture, family)


def test_spot_quotas_count_p5_separately():
    assert [quota_family_of(n) for n in ("p4d.24xlarge", "p5.4xlarge", "p6-b200.48xlarge", "g5.xlarge")] == [
        "P",
        "P5",
        "P5",
        "G",
    ]


def awkward_rows(count):
    """As SkyPilot's file of AWS: 1,372 types, 85 accelerated, 22 regions, gaps and oddities in between."""
    rng = random.Random(7)
    regions = [f"region-{i}" for i in range(22)]
    produced = 0
    while True:
        for index in range(1372):
            gpu = index < 85
            name = f"g{index}dn.xlarge" if gpu else f"c{index}.xlarge"
            accelerator = ("Abacus" if index == 3 else "T4") if gpu else ""
            number = ("0.125" if index == 4 else "1.0") if gpu else ""
            info = gpu_info("T4", 16384, rng.choice(["1", "1.0"])) if gpu else ""
            for region in rng.sample(regions, 14):
                usd = rng.uniform(0.05, 5)
                for zone in range(3):
                    price = "" if rng.random() < 0.002 else f"{usd:.5g}"
                    spot = "" if rng.random() < 0.02 else f"{usd * rng.uniform(0.2, 1.02):.6f}"
                    vcpus = "many" if rng.random() < 0.0005 else "4.0"
                    head = "" if rng.random() < 0.0005 else name
                    yield (
                        f"{head},{accelerator},{number},{vcpus},16.0,{info},{price},{spot},{region},{region}-az{zone},x86_64"
                    )
                    produced += 1
                    if produced == count:
                        return


def test_54_000_rows_are_imported_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    path = tmp_path / "vms.csv"
    path.write_text("\n".join((HEADER + ",Arch", *awkward_rows(54_000))) + "\n")

    report = import_file(path, provider="aws", name="large").report
    catalog = library.load("large")
    assert report.rows == 54_000
    assert report.kept + sum(t.rows for t in report.left_out) == report.rows
    assert report.kept > 53_000
    assert {"spot at or above on-demand", "no spot price", "a fraction of an accelerator"} <= set(
        reasons(report.flagged)
    )
    assert sum(map(len, catalog.prices.values())) == report.offers > 100_000
    assert len(catalog.regions) == 22
    assert len(catalog.prices[Market.SPOT]) < report.kept


def test_an_import_needs_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    (tmp_path / "vms.csv").write_text(f"{HEADER}\nc5.xlarge,,,4,8,,0.17,0.07,r1,a\n")
    with pytest.raises(UsageError, match="built in"):
        import_file(tmp_path / "vms.csv", provider="aws", name="paper-virtual")
