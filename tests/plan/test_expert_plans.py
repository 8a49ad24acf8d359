"""Plans that an expert would sign: what trials found absurd does not come back."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from deepvm import plan as planning
from deepvm.catalog import Catalog, Instance
from deepvm.errors import Infeasible, UnknownName, UsageError
from deepvm.plan import Recommendation, Request
from deepvm.plan.search.tiers import failure_per_day
from tests.support.small_markets import small_catalog

DAY = date(2026, 11, 15)
Offers = list[tuple[int, int, float]]


def gpu(name: str, accelerator: str = "T4", **facts: object) -> Instance:
    base: dict[str, object] = {
        "family": "G", "vcpus": 8, "memory_gib": 64.0, "accelerator_count": 1, "accelerator_memory_gib": 16.0,
        "eflops": 100.0, "sustained_gbps": 25.0,
    }  # fmt: skip
    return Instance(name=name, accelerator=accelerator, **{**base, **facts})  # type: ignore[arg-type]


def cpu(name: str, **facts: object) -> Instance:
    return Instance(name=name, **{"family": "C", "vcpus": 4, "memory_gib": 16.0, "sustained_gbps": 10.0, **facts})  # type: ignore[arg-type]


def aws(machines: list[Instance], on_demand: Offers, spot: Offers, **facts: object) -> Catalog:
    return replace(small_catalog(machines, on_demand, spot, **facts), provider="aws")  # type: ignore[arg-type]


def best_of(catalog: Catalog, **wanted: object) -> Recommendation:
    return planning.plan(catalog, Request(**{"budget_usd": 10.0, "gradient_bytes": 0, **wanted})).recommendations[0]  # type: ignore[arg-type]


def memory_of(best: Recommendation) -> tuple[str, int]:
    (role,) = (role for role in best.roles if role.role == "memory")
    return role.instance, role.count


def reasons(catalog: Catalog, **wanted: object) -> dict[str, str]:
    left_out = planning.plan(catalog, Request(budget_usd=10.0, **wanted)).left_out  # type: ignore[arg-type]
    return {out.example: out.reason for out in left_out}


# --- memory nodes -----------------------------------------------------------------------------------------------


def test_burstable_machines_keep_no_checkpoints() -> None:
    machines = [
        gpu("g"),
        cpu("t3a.nano", vcpus=2, memory_gib=0.5, sustained_gbps=0.032),
        cpu("t3a.small", vcpus=2, memory_gib=2.0, sustained_gbps=0.128),
        cpu("c6a.large", vcpus=2, memory_gib=4.0, sustained_gbps=0.78),
    ]
    market = aws(machines, [(1, 0, 0.0047), (2, 0, 0.0188), (3, 0, 0.0765)], [(0, 0, 0.5)])
    assert memory_of(best_of(market)) == ("c6a.large", 1)
    assert "burstable" in reasons(market)["t3a.nano"]
    many = best_of(market, checkpoint_bytes=10_000_000_000, checkpoint_every_s=3600.0, max_nodes=100)
    assert memory_of(many)[0] == "c6a.large"


def test_the_operating_system_of_a_memory_node_has_room() -> None:
    machines = [gpu("g"), cpu("tiny", memory_gib=1.0), cpu("single", vcpus=1), cpu("c", memory_gib=4.0)]
    market = small_catalog(machines, [(1, 0, 0.001), (2, 0, 0.002), (3, 0, 0.1)], [(0, 0, 0.5)])
    assert memory_of(best_of(market)) == ("c", 1)
    assert "operating system" in reasons(market)["tiny"]
    assert "one vCPU" in reasons(market)["single"]


def test_few_large_memory_nodes_are_preferred_to_many_small_ones() -> None:
    machines = [gpu("g"), cpu("small", memory_gib=4.0), cpu("large", memory_gib=64.0)]
    market = small_catalog(machines, [(1, 0, 0.03), (2, 0, 0.26)], [(0, 0, 0.5)])
    best = best_of(market, checkpoint_bytes=10_000_000_000, checkpoint_every_s=600.0, budget_usd=1.0)
    assert memory_of(best) == ("large", 1)  # eight small ones would cost $0.24
    assert best.memory_failure_per_day == failure_per_day(1)
    assert failure_per_day(87) == pytest.approx(1 - (1 - 0.05 / 365) ** 87)


def test_a_slow_restore_is_not_bought_to_save_cents() -> None:
    machines = [gpu("g", eflops=1000.0), cpu("slow", sustained_gbps=0.4), cpu("fast", sustained_gbps=10.0)]
    market = small_catalog(machines, [(1, 0, 0.05), (2, 0, 0.4)], [(0, 0, 6.0)])
    dear = best_of(market, budget_usd=100.0)
    assert (dear.nodes, memory_of(dear)) == (16, ("fast", 1))
    assert dear.restore is not None
    assert dear.restore.time.total_s < 10
    calm = best_of(market, budget_usd=100.0, losses_per_h=0.0)
    assert memory_of(calm) == ("slow", 1)
    assert calm.restore is not None
    assert calm.restore.time.total_s > 90
    cheap = best_of(replace(market, instances=(gpu("g", eflops=1.0), *machines[1:])), budget_usd=6.1)
    assert memory_of(cheap) == ("slow", 1)  # one worker restores in 6 s


def test_burst_bandwidth_is_not_what_a_node_sustains() -> None:
    machines = [gpu("g"), cpu("m5.large", vcpus=2, sustained_gbps=None, burst_gbps=10.0)]
    best = best_of(aws(machines, [(1, 0, 0.1)], [(0, 0, 0.5)]))
    assert best.restore is not None
    assert best.restore.time.fetch_s == pytest.approx(best.nodes * 0.3 * 8 / 0.36, rel=0.3)
    assert "bandwidth of m5.large (by its family)" in best.estimates


# --- traffic ----------------------------------------------------------------------------------------------------


def test_traffic_to_another_zone_is_in_the_price_and_in_the_choice() -> None:
    places = (("us-east-1", "us-east-1a"), ("us-east-1", "us-east-1b"))
    here, there = [(1, 0, 0.30), (2, 0, 0.5)], [(1, 1, 0.05)]
    machines = [gpu("g"), cpu("near", memory_gib=64.0), cpu("dear", memory_gib=64.0)]
    wanted = {"checkpoint_bytes": 6_000_000_000, "checkpoint_every_s": 100.0, "memory_in": "region"}
    both = best_of(
        aws(machines, [*here, *there], [(0, 0, 5.0)], places=places), zone=("us-east-1a", "us-east-1b"), **wanted
    )
    assert [role.zone for role in both.roles] == ["us-east-1a", "us-east-1a"]
    assert both.traffic_usd_per_hour == 0
    only = best_of(aws(machines, there, [(0, 0, 5.0)], places=places), **wanted)
    assert [role.zone for role in only.roles] == ["us-east-1a", "us-east-1b"]
    saves, restores = 36 * 6, 0.5 * only.nodes * 6  # gigabytes an hour
    assert only.traffic_usd_per_hour == pytest.approx(0.02 * (saves + restores))
    assert only.hourly_usd == pytest.approx(5.0 + 0.05 + only.traffic_usd_per_hour)
    assert only.to_json()["traffic_usd_per_hour"] == only.traffic_usd_per_hour
    with pytest.raises(Infeasible, match=r"the cheapest plan costs \$9\."):
        best_of(aws(machines, there, [(0, 0, 5.0)], places=places), **{**wanted, "budget_usd": 6.0})


# --- what may train ---------------------------------------------------------------------------------------------


def test_cards_of_other_makers_are_asked_for_and_those_without_pytorch_by_name() -> None:
    machines = [gpu("t4"), gpu("amd", "MI300X"), gpu("v520", "Radeon Pro V520"), gpu("k80", "K80"), cpu("c")]
    spot = [(0, 0, 0.5), (1, 0, 0.4), (2, 0, 0.3), (3, 0, 0.3)]
    market = small_catalog(machines, [(4, 0, 0.1)], spot)

    def trained(**wanted: object) -> str:
        return best_of(market, max_nodes=1, budget_usd=0.7, top=5, **wanted).worker.instance

    assert trained() == "t4"
    assert trained(vendor="amd") == "amd"
    assert trained(vendor="any") == "amd"
    assert trained(gpu="MI300X") == "amd"
    assert trained(gpu="K80") == "k80"
    assert trained(objective="flopp") in ("v520", "k80")  # the published method asks for no maker
    why = reasons(market)
    assert (why["amd"], why["v520"]) == (
        "a GPU of amd (--vendor amd admits it)",
        "a GPU that PyTorch does not support (--gpu admits it)",
    )
    with pytest.raises(UnknownName, match="did you mean nvidia"):
        Request(budget_usd=1, vendor="nvida")


@pytest.mark.parametrize("local", ["us-east-1-bos-1a", "use1-bos1-az1", "us-east-1-wl1-bos-wlz-1"])
def test_local_zones_are_asked_for(local: str) -> None:
    places = (("us-east-1", "us-east-1a"), ("us-east-1", local))
    offers = [(0, 0, 0.9), (0, 1, 0.2)]
    market = aws([gpu("g"), cpu("c")], [(1, 0, 0.1), (1, 1, 0.1)], offers, places=places)
    assert best_of(market).worker.zone == "us-east-1a"
    assert "local zone" in reasons(market)[local]
    assert best_of(market, local_zones=True).worker.zone == local
    assert best_of(market, zone=local).worker.zone == local
    assert best_of(market, objective="flopp").worker.zone == local


def test_a_market_has_64_gpus_of_a_type_unless_the_user_knows_better() -> None:
    machines = [gpu("one"), gpu("eight", accelerator_count=8, eflops=100.0), cpu("c")]
    market = small_catalog(machines, [(2, 0, 0.1)], [(0, 0, 0.02), (1, 0, 0.2)])
    assert best_of(market, gpu="T4").nodes == 64
    assert best_of(replace(market, instances=(gpu("one", eflops=1.0), *machines[1:]))).nodes == 8
    assert best_of(market, market_gpus=200).nodes == 200
    with pytest.raises(Infeasible, match=r"no cluster meets --market-gpus 1, at any price: expect more of a market"):
        best_of(
            small_catalog(machines[1:], [(1, 0, 0.1)], [(0, 0, 0.3)]),
            market_gpus=1,
            market="none",
            work_eflops_h=150.0,
            deadline_s=3600.0,
        )
    why = planning.explain(market, planning.plan(market, Request(budget_usd=10.0, gradient_bytes=0)), DAY)
    assert any("64 GPUs of one type in a place" in each for each in why.binding)


def test_a_mixed_cluster_has_no_more_of_a_type_than_its_market() -> None:
    machines = [gpu("good", eflops=120.0), gpu("next"), cpu("c")]
    market = small_catalog(machines, [(2, 0, 0.1)], [(0, 0, 0.1), (1, 0, 0.1)])
    best = best_of(market, mixed=True, market_gpus=4, budget_usd=0.7)
    assert [(role.instance, role.count) for role in best.roles] == [("good", 4), ("next", 2), ("c", 1)]


def test_a_market_has_one_machine_of_any_type_it_sells_unless_the_user_limits_it() -> None:
    large = small_catalog([gpu("g", accelerator_count=128), cpu("c")], [(1, 0, 0.1)], [(0, 0, 4.0)])
    assert best_of(large).nodes == 1
    market = small_catalog([gpu("g", accelerator_count=8), cpu("c")], [(0, 0, 3.0), (1, 0, 0.1)], [(0, 0, 0.5)])
    assert best_of(market, market_gpus=17, architectures=("tiering",)).nodes == 2
    for more in ({}, {"work_eflops_h": 800.0, "objective": "cost"}, {"mixed": True}):
        for architectures in (("tiering",), ("all-on-demand",)):
            with pytest.raises(Infeasible, match="--market-gpus 4"):
                best_of(market, market_gpus=4, architectures=architectures, **more)  # type: ignore[arg-type]


# --- what is recommended ----------------------------------------------------------------------------------------


def test_recommendations_differ_in_type_place_or_shape() -> None:
    places = (("r", "a"), ("r", "b"))
    machines = [gpu("fast", eflops=200.0), gpu("slow"), *(cpu(f"c{i}") for i in range(20))]
    on_demand = [(i, p, 0.1 + i / 100) for i in range(2, 22) for p in range(2)] + [(0, 0, 1.0), (1, 1, 1.0)]
    spot = [(i, p, 0.3 + p / 100) for i in range(2) for p in range(2)]
    plan = planning.plan(small_catalog(machines, on_demand, spot, places=places), Request(budget_usd=5, top=20))
    kinds = [(r.architecture, r.worker.instance, r.worker.zone) for r in plan.recommendations]
    assert len(kinds) == len(set(kinds)) == 6
    assert [r.rank for r in plan.recommendations] == [1, 2, 3, 4, 5, 6]


def test_what_the_request_says_of_markets_is_checked() -> None:
    for wrong in ({"market_gpus": 0}, {"losses_per_h": -1.0}, {"losses_per_h": float("nan")}):
        with pytest.raises(UsageError):
            Request(budget_usd=1, **wrong)  # type: ignore[arg-type]


def test_a_spot_machine_as_dear_as_one_that_stays_is_not_rented() -> None:
    market = small_catalog([gpu("g"), cpu("c")], [(0, 0, 0.5), (1, 0, 0.1)], [(0, 0, 0.5)])
    with pytest.raises(Infeasible, match="no spot price of any GPU type"):
        best_of(market)
    assert best_of(market, architectures=("all-on-demand",)).roles[0].market.value == "on-demand"
    assert reasons(market, architectures=("all-on-demand",))["g"] == "no spot price below on-demand"
    assert best_of(market, objective="flopp").worker.market.value == "spot"


def test_types_that_a_cloud_ended_are_not_planned() -> None:
    machines = [
        gpu("Standard_NC4as_T4_v3"),
        gpu("Standard_NC6_Promo"),
        cpu("Standard_D2_v2_Promo"),
        cpu("Standard_D2s_v5"),
    ]
    market = small_catalog(machines, [(2, 0, 0.01), (3, 0, 0.1)], [(0, 0, 0.5), (1, 0, 0.1)])
    best = best_of(replace(market, provider="azure"))
    assert [role.instance for role in best.roles] == ["Standard_NC4as_T4_v3", "Standard_D2s_v5"]
    assert "no longer sold" in reasons(replace(market, provider="azure"))["Standard_NC6_Promo"]


def test_the_same_cluster_at_the_same_price_is_recommended_once() -> None:
    places = tuple(("r", zone) for zone in "abc")
    machines = [gpu("fast", eflops=200.0), gpu("slow"), cpu("c")]
    on_demand = [(2, p, 0.1) for p in range(3)]
    spot = [(0, 0, 0.3), (0, 1, 0.3), (0, 2, 0.31), *((1, p, 0.3) for p in range(3))]
    market = small_catalog(machines, on_demand, spot, places=places)
    found = planning.plan(market, Request(budget_usd=5.0, top=9)).recommendations
    assert [(r.worker.instance, r.worker.zone) for r in found] == [("fast", "a"), ("fast", "c"), ("slow", "a")]
