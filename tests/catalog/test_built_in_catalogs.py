"""The built-in data are whole, sound, and the figures that they claim to be."""

from datetime import date

import pytest

from deepvm.catalog import Market, library
from deepvm.catalog.check import Severity, check

DAY = {
    "aws-2026-08": date(2026, 8, 22),
    "paper-aws-2023": date(2023, 10, 1),
    "paper-virtual": date(2023, 10, 1),
}


def usd(catalog, instance, market):
    (offer,) = (o for o in catalog.offers(instance) if o.market is market)
    return offer.usd_per_hour


@pytest.mark.parametrize("name", library.BUILT_IN)
def test_built_in_catalogues_are_sound(name):
    findings = check(library.load(name), DAY[name])
    assert [f for f in findings if f.severity is not Severity.NOTE] == []


@pytest.mark.parametrize(
    ("name", "gpu_types", "cpu_types"),
    [("aws-2026-08", 22, 19), ("paper-virtual", 10, 8), ("paper-aws-2023", 3, 8)],
)
def test_built_in_catalogues_are_whole(name, gpu_types, cpu_types):
    catalog = library.load(name)
    accelerated = [i for i in catalog.instances if i.accelerator is not None]
    assert (len(accelerated), len(catalog.instances) - len(accelerated)) == (gpu_types, cpu_types)
    assert {m: len(p) for m, p in catalog.prices.items()} == dict.fromkeys(Market, gpu_types + cpu_types)
    assert catalog.places == (("us-east-1", None),)
    assert catalog.prices_seen == (DAY[name], DAY[name])
    assert catalog.name == name


@pytest.mark.parametrize(
    ("instance", "on_demand", "low", "median", "high", "sustained", "burst", "lost"),
    [
        ("g4dn.xlarge", 0.526, 0.3265, 0.3599, 0.3739, 5, 25, (15, 20)),
        ("g5.xlarge", 1.006, 0.5302, 0.6380, 0.9671, 2.5, 10, (20, 100)),
        ("g6.48xlarge", 13.3504, 3.5771, 13.3504, 13.3504, 100, 100, (20, 100)),
        ("g6e.2xlarge", 2.24208, 1.9605, 1.9931, 2.0787, 5, 20, (10, 15)),
        ("p4d.24xlarge", 21.9576, 10.1302, 19.0017, 19.6241, 400, 400, (10, 15)),
        ("p5.4xlarge", 6.88, 2.6295, 2.6295, 3.7598, 100, 100, None),
        ("p6-b200.48xlarge", 113.933, 41.8661, 41.8779, 41.8898, 3200, 3200, None),
        ("c5.xlarge", 0.17, 0.0684, 0.0709, 0.0801, 1.25, 10, (0, 5)),
        ("c6in.2xlarge", 0.4536, 0.1575, 0.1659, 0.1942, 12.5, 40, (20, 100)),
        ("r6in.4xlarge", 1.39464, 0.2408, 0.7038, 1.0186, 25, 50, (20, 100)),
        ("t3.xlarge", 0.1664, 0.0506, 0.0580, 0.0759, 1.024, 5, (10, 15)),
    ],
)
def test_aws_2026_08_has_the_prices_of_its_day(instance, on_demand, low, median, high, sustained, burst, lost):
    catalog = library.load("aws-2026-08")
    assert usd(catalog, instance, Market.ON_DEMAND) == on_demand
    (spot,) = (o for o in catalog.offers(instance) if o.market is Market.SPOT)
    assert (spot.usd_low, spot.usd_per_hour, spot.usd_high) == (low, median, high)
    machine = catalog.instance(instance)
    assert (machine.sustained_gbps, machine.burst_gbps, machine.interruption_percent) == (
        sustained,
        burst,
        lost,
    )


@pytest.mark.parametrize(
    ("instance", "accelerator", "count", "gpu_gib", "vcpus", "gib"),
    [
        ("g4dn.metal", "T4", 8, 16, 96, 384),
        ("g5.12xlarge", "A10G", 4, 22.4, 48, 192),
        ("g6e.48xlarge", "L40S", 8, 44.7, 192, 1536),
        ("p4de.24xlarge", "A100-80GB", 8, 80, 96, 1152),
        ("p5en.48xlarge", "H200", 8, 141, 192, 2048),
        ("c5n.2xlarge", None, 0, None, 8, 21),
    ],
)
def test_aws_2026_08_has_the_sizes_of_its_machines(instance, accelerator, count, gpu_gib, vcpus, gib):
    machine = library.load("aws-2026-08").instance(instance)
    assert (machine.accelerator, machine.accelerator_count) == (accelerator, count)
    assert (machine.accelerator_memory_gib, machine.vcpus, machine.memory_gib) == (gpu_gib, vcpus, gib)
    assert machine.architecture == "x86_64"


@pytest.mark.parametrize(
    ("name", "on_demand", "spot", "gbps", "eflops", "a", "b", "c"),
    [
        ("A", 0.75, 0.225, 10, 100, 0.14, 14.5, 13.5),
        ("B", 0.526, 0.1578, 25, 377, 0.13, 12.9, 6.2),
        ("C", 1.006, 0.3018, 10, 696, 0.09, 20.1, 5.0),
        ("D", 0.55, 0.165, 15, 700, 0.2, 10.0, 5.0),
        ("E", 0.368, 0.1104, 1.7, 100, 0.1, 20.0, 15.0),
        ("F", 1.236, 0.3708, 25, 800, 0.1, 15.0, 10.0),
        ("G", 0.973, 0.2919, 30, 200, 0.1, 15.0, 10.0),
        ("H", 0.252, 0.0756, 5, 150, 0.2, 10.0, 5.0),
        ("I", 1.622, 0.4866, 30, 900, 0.2, 9.9, 7.0),
        ("J", 0.22, 0.066, 5, 50, 0.1, 20.0, 15.0),
    ],
)
def test_paper_virtual_is_table_two(name, on_demand, spot, gbps, eflops, a, b, c):
    catalog = library.load("paper-virtual")
    machine = catalog.instance(name)
    assert (usd(catalog, name, Market.ON_DEMAND), usd(catalog, name, Market.SPOT)) == (on_demand, spot)
    assert (machine.vcpus, machine.gbps, machine.eflops) == (4, gbps, eflops)
    assert machine.speedup == {"model": "logistic", "a": a, "b": b, "c": c}


@pytest.mark.parametrize("catalog_name", ["paper-virtual", "paper-aws-2023"])
@pytest.mark.parametrize(
    ("name", "on_demand", "spot", "gib", "gbps"),
    [
        ("c3.xlarge", 0.21, 0.1281, 7.5, 0.3),
        ("c4.xlarge", 0.199, 0.1257, 7.5, 1.7),
        ("t3.xlarge", 0.1664, 0.1033, 16, 5),
        ("c5.xlarge", 0.17, 0.0999, 8, 10),
        ("m6i.xlarge", 0.192, 0.12, 16, 12.5),
        ("d3.xlarge", 0.499, 0.1584, 32, 15),
        ("c5n.xlarge", 0.216, 0.127, 10.5, 25),
        ("c6in.xlarge", 0.2268, 0.1272, 8, 30),
    ],
)
def test_both_papers_share_their_memory_nodes(catalog_name, name, on_demand, spot, gib, gbps):
    catalog = library.load(catalog_name)
    machine = catalog.instance(name)
    assert (usd(catalog, name, Market.ON_DEMAND), usd(catalog, name, Market.SPOT)) == (on_demand, spot)
    assert (machine.vcpus, machine.memory_gib, machine.gbps) == (4, gib, gbps)
    assert machine.family == name[0].upper()


@pytest.mark.parametrize(
    ("name", "on_demand", "spot", "gib", "gbps", "eflops", "a", "b", "c"),
    [
        ("g3s.xlarge", 0.75, 0.225, 30.5, 10, 100, 0.1408559584, 14.49263334, 13.53250952),
        ("g4dn.xlarge", 0.526, 0.1578, 16, 25, 377, 0.1338806402, 12.87424514, 6.176666667),
        ("g5.xlarge", 1.006, 0.3018, 16, 10, 696, 0.08533428072, 20.06669931, 4.962225551),
    ],
)
def test_paper_aws_2023_is_what_the_experiments_used(name, on_demand, spot, gib, gbps, eflops, a, b, c):
    catalog = library.load("paper-aws-2023")
    machine = catalog.instance(name)
    assert (usd(catalog, name, Market.ON_DEMAND), usd(catalog, name, Market.SPOT)) == (on_demand, spot)
    assert (machine.vcpus, machine.memory_gib, machine.gbps, machine.eflops) == (4, gib, gbps, eflops)
    assert machine.speedup == {"model": "logistic", "a": a, "b": b, "c": c}


def test_quotas_of_the_papers():
    quotas = {(q.families, q.market): q.vcpus for q in library.load("paper-aws-2023").quotas}
    expected = {(("G",), Market.ON_DEMAND): 32, (("G",), Market.SPOT): 128}
    expected |= {((family,), market): 256 for family in "CDMT" for market in Market}
    assert quotas == expected
    assert library.load("paper-virtual").quotas == ()
    assert library.load("aws-2026-08").quotas == ()
