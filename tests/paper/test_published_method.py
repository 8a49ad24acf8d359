"""The planner against the published method, written a second time as nested loops."""

from __future__ import annotations

import pytest

from deepvm.catalog import load
from deepvm.errors import UnknownName, UsageError
from deepvm.paper import published, reference
from deepvm.paper.sweeps import Sweeps, statistics
from deepvm.plan import POLICIES, budgets
from deepvm.units import USD_TOLERANCE

BUDGETS = budgets(*reference.SWEEP_USD)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.chaos)])
def test_under_flopp_the_planner_chooses_as_the_published_method_at_every_budget(
    policy: str, every: int, sweeps: Sweeps, virtual: published.Setting
) -> None:
    points = {point.budget_usd: point for point in sweeps.flopp if point.policy == policy}
    assert list(points) == BUDGETS
    for budget, point in list(points.items())[::every]:
        found = published.recommend(virtual, budget, policy, prune=True)
        if not found:
            assert point.instance is None, f"only the planner finds a cluster at {budget}"
            continue
        (loop,) = found
        assert (point.architecture, point.instance, point.count) == (loop.architecture, loop.instance, loop.count)
        assert point.hourly_usd == pytest.approx(loop.hourly_usd)
        assert point.performance == pytest.approx(loop.performance)


def test_pruned_loops_find_what_whole_loops_find(virtual: published.Setting) -> None:
    few = published.Setting(gpus=virtual.gpus[:4], cpus=virtual.cpus[2:5], memory_gib=virtual.memory_gib)
    for budget in (0.2, 1.5, 6.4):
        whole = list(published.clusters(few, budget))
        assert whole == list(published.clusters(few, budget, prune=True))
        assert all(usd <= budget + USD_TOLERANCE for *_, usd in whole)


def test_throughput_is_the_true_optimum_at_all_98_feasible_budgets(sweeps: Sweeps) -> None:
    assert len(sweeps.optima) == 98
    assert [o.throughput_ratio for o in sweeps.optima] == pytest.approx([1.0] * 98, rel=1e-12)


def test_the_published_objective_misses_the_optimum_at_44_budgets(sweeps: Sweeps) -> None:
    found = statistics(sweeps)
    assert (found.feasible, found.not_optimal, found.behind_performance_first) == (98, 44, 13)
    assert found.worst_ratio == pytest.approx(2.168, abs=0.001)
    assert found.mean_ratio == pytest.approx(1.199, abs=0.001)


def test_one_pass_over_all_clusters_gives_the_optimum_of_each_budget(
    sweeps: Sweeps, virtual: published.Setting
) -> None:
    for optimum in (sweeps.optima[0], sweeps.optima[40], sweeps.optima[-1]):
        (found,) = published.best(virtual, optimum.budget_usd, published.performance, prune=True)
        assert optimum.performance == published.performance(found[0], found[1])


def test_the_loops_give_table_iv_in_order() -> None:
    setting = published.setting_of(
        load("paper-aws-2023"),
        checkpoint_bytes=reference.TABLE_IV_CHECKPOINT_BYTES,
        buffers=reference.BUFFERS,
    )
    for was in reference.TABLE_IV:
        found = published.recommend(setting, reference.TABLE_IV_BUDGET_USD, was.policy, top=3, prune=True)
        row = found[was.rank - 1]
        assert (row.instance, row.count) == (was.gpu, was.gpu_count)
        assert (row.memory_instance, row.memory_count) == (was.cpu, was.cpu_count)
        assert row.hourly_usd == pytest.approx(was.hourly_usd, abs=5e-5)


def test_quotas_end_the_search_one_machine_early_but_not_the_baselines() -> None:
    setting = published.setting_of(load("paper-aws-2023"), checkpoint_bytes=1, buffers=1)
    (found,) = published.recommend(setting, 1000.0, "noscale", prune=True)
    assert found.count == 31  # of 128 vCPUs, 32 machines
    (found,) = published.recommend(setting, 1000.0, "cost-first")
    assert found.count == 32


def test_of_equal_worth_the_cheaper_cluster_wins(virtual: published.Setting) -> None:
    found = published.best(virtual, 3.0, published.flopp, top=20, prune=True)
    same = [usd for v, n, _, _, usd in found if (v, n) == found[0][:2]]
    assert len(same) > 1
    assert same == sorted(same)


def test_an_unknown_policy_is_reported_with_the_nearest(virtual: published.Setting) -> None:
    with pytest.raises(UnknownName, match="cost-first"):
        published.recommend(virtual, 1.0, "cost-frist")


def test_only_catalogues_of_the_papers_kind_are_taken() -> None:
    with pytest.raises(UsageError, match="paper"):
        published.setting_of(load("aws-2026-08"), checkpoint_bytes=1, buffers=1)
