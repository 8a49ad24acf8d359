"""What a plan says about its run, and who decides what: the command line, the plan, or nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import DeepvmError, UsageError
from deepvm.policy import YoungDaly, parse_policy
from deepvm.policy.conduct import Conduct
from deepvm.runtime.agent.prefetch import store_urls
from deepvm.runtime.cluster import Cluster, load_cluster, scaled
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.policies import (
    choose_policies,
    conduct_facts,
    losses_per_h,
    scaled_after_loss,
    with_hazard,
)
from tests.support.runtime.whole_runs import write_plan

CONDUCT = {
    "zones": ["us-east-1a", "us-east-1b"], "way_back": 0.7, "at_loss": "shrink", "least_workers": 2,
    "save": "young-daly:mtbf=2h", "tier": "memory", "replicas": 2, "fallback": "none",
}  # fmt: skip


def cluster_with(folder: Path, conduct: Any) -> Cluster:
    path = write_plan(folder)
    plan = json.loads(path.read_text(encoding="utf-8"))
    best = plan["recommendations"][0]
    best["conduct"] = conduct
    next(role for role in best["roles"] if role["role"] == "memory")["count"] = 2
    path.write_text(json.dumps(plan), encoding="utf-8")
    return load_cluster(path)


def test_a_plan_says_how_to_run_it_and_the_ledger_keeps_that(tmp_path: Path) -> None:
    cluster = cluster_with(tmp_path, CONDUCT)
    assert cluster.conduct == Conduct(
        zones=("us-east-1a", "us-east-1b"),
        way_back=0.7,
        at_loss="shrink",
        least_workers=2,
        save="young-daly:mtbf=2h",
        tier="memory",
        replicas=2,
    )
    with Ledger.create(tmp_path / "ledger.sqlite", run="r", cluster=cluster) as ledger:
        assert ledger.cluster == cluster
    assert load_cluster(write_plan(tmp_path)).conduct is None


@pytest.mark.parametrize(
    "wrong",
    [
        "wait", {"at_loss": "panic"}, {"least_workers": 0}, {"zones": "us-east-1a"}, {"save": 5}, {"tier": "tape"},
        {"fallback": "maybe"}, {"replicas": -1}, {"fallback_tries": -1}, {"way_back": 1}, {"ceiling": 0.5},
    ],
)  # fmt: skip
def test_a_conduct_that_is_not_one_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(DeepvmError, match="not a valid plan"):
        cluster_with(tmp_path, {**CONDUCT, **wrong} if isinstance(wrong, dict) else wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"tier": "anchor"}, "tier is 'anchor', and the plan's machines are for 'memory'"),
        ({"tier": "durable", "replicas": 0}, "tier is 'durable', and the plan's machines are for 'memory'"),
        ({"replicas": 10000}, "replicas is 10000, and the plan has 2 memory nodes"),
        ({"replicas": 0}, "replicas is 0, and the plan has 2 memory nodes"),
        ({"least_workers": 18}, "least_workers is 18, and the plan has 17 machines that train"),
    ],
)
def test_a_conduct_of_other_machines_than_the_plans_is_refused(tmp_path: Path, wrong: Any, told: str) -> None:
    with pytest.raises(DeepvmError, match=f"not a valid plan: {told}"):
        cluster_with(tmp_path, {**CONDUCT, **wrong})


def test_the_user_decides_then_the_plan_then_the_default() -> None:
    conduct = Conduct.from_json(CONDUCT)
    chosen = choose_policies(conduct, policy=None, after_loss="wait:5s")
    assert (chosen.policy, chosen.after_loss) == ("young-daly:mtbf=2h", "wait:5s")
    assert chosen.origins == {"policy": "plan", "after_loss": "command line"}
    assert choose_policies(conduct, policy=None, after_loss=None).after_loss == "shrink:2"
    plain = choose_policies(None, policy=None, after_loss=None)
    assert (plain.policy, plain.after_loss) == ("every 10s or at notice", "wait")
    assert set(plain.origins.values()) == {"default"}


def test_a_plan_of_several_zones_moves_at_the_threshold_of_its_replays_unless_the_user_says_otherwise() -> None:
    several = Conduct.from_json(CONDUCT)

    def threshold(conduct: Conduct | None, given: str | None) -> float | None:
        return choose_policies(conduct, policy=None, after_loss=None, replan_threshold=given).replan_threshold

    assert threshold(several, None) == pytest.approx(0.3)
    assert threshold(several, "never") is None
    assert threshold(several, "20%") == pytest.approx(0.2)
    assert threshold(Conduct(zones=("us-east-1a",)), None) is None
    assert threshold(None, "0.15") == pytest.approx(0.15)
    for wrong in ("0%", "100%", "often", "-5%", "nan"):
        with pytest.raises(UsageError, match="not a valid threshold"):
            threshold(None, wrong)


def test_one_machine_of_each_role_of_the_failover_list_is_kept(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    plan = json.loads(path.read_text(encoding="utf-8"))
    plan["failover"] = plan["recommendations"][1:]
    path.write_text(json.dumps(plan), encoding="utf-8")
    cluster = load_cluster(path)
    roles = [[role["role"] for role in row["roles"]] for row in plan["failover"]]
    assert [machine.role for machine in cluster.failover] == [role for row in roles for role in row]
    with Ledger.create(tmp_path / "ledger.sqlite", run="r", cluster=cluster) as ledger:
        assert ledger.cluster.failover == cluster.failover
    plan["failover"] = [{"roles": "none"}]
    path.write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(DeepvmError, match="not a valid plan"):
        load_cluster(path)


def test_young_daly_without_a_hazard_gets_that_of_the_plans_market(tmp_path: Path) -> None:
    per_h = losses_per_h(load_cluster(write_plan(tmp_path)))
    assert per_h is not None
    assert 0.05 < per_h < 2
    found = parse_policy(with_hazard("young-daly or at notice", per_h))
    first = next(part for part in getattr(found, "policies", ()) if isinstance(part, YoungDaly))
    assert first.hazard_per_s == pytest.approx(per_h / 3600)
    for text in ("young-daly:mtbf=2h", "every 10s or at notice"):
        assert with_hazard(text, per_h) == text
    assert with_hazard("young-daly", None) == "young-daly"


def test_the_ledger_is_told_which_policies_the_run_follows(tmp_path: Path) -> None:
    spec = RunSpec(script="x.py", policy="young-daly", origins={"policy": "command line", "after_loss": "default"})
    facts = conduct_facts(spec, load_cluster(write_plan(tmp_path)))
    assert facts["save"]["policy"].startswith("young-daly:hazard=")
    assert facts["save"]["by"] == "command line"
    assert facts["after_loss"] == {"policy": "wait", "by": "default"}


def test_the_least_number_of_workers_shrinks_with_the_part_of_the_plan_that_this_host_runs(tmp_path: Path) -> None:
    cluster = cluster_with(tmp_path, CONDUCT)
    spec = RunSpec(script="x.py", after_loss="shrink:12", origins={"after_loss": "plan"})
    assert len(cluster.trainers) == 17
    assert scaled_after_loss(spec, cluster) == "shrink:12"
    assert scaled_after_loss(spec, scaled(cluster, most_trainers=4)) == "shrink:3"
    assert scaled_after_loss(spec, scaled(cluster, most_trainers=1)) == "shrink"
    given = replace(spec, origins={"after_loss": "command line"})
    assert scaled_after_loss(given, scaled(cluster, most_trainers=4)) == "shrink:12"


def test_a_plans_save_policy_that_is_not_valid_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DeepvmError, match="not a valid plan: 'often' is not a valid save policy"):
        cluster_with(tmp_path, {**CONDUCT, "save": "often"})
    script = tmp_path / "x.py"
    script.touch()
    with pytest.raises(UsageError, match="'often' is not a valid save policy"):
        RunSpec(script=str(script), policy="often").check()


def test_a_conduct_comes_back_from_its_json() -> None:
    late = Conduct.from_json({**CONDUCT, "ceiling": 2, "fallback": "on-demand at the last moment", "fallback_tries": 4})
    assert (late.fallback_tries, late.ceiling) == (4, 2)
    assert Conduct.from_json(late.to_json()) == late
    assert Conduct.from_json(Conduct().to_json()) == Conduct()


def test_a_plan_says_how_long_its_work_takes_and_its_deadline(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    assert (load_cluster(path).work_h, load_cluster(path).deadline_s) == (None, None)
    plan = json.loads(path.read_text(encoding="utf-8"))
    plan["request"] |= {"work_eflops_h": 2 * plan["recommendations"][0]["performance"], "deadline_s": 9000.0}
    path.write_text(json.dumps(plan), encoding="utf-8")
    cluster = load_cluster(path)
    assert (cluster.work_h, cluster.deadline_s) == (pytest.approx(2.0), 9000.0)
    with Ledger.create(tmp_path / "ledger.sqlite", run="r", cluster=cluster) as ledger:
        assert ledger.cluster == cluster


def test_trainers_keep_as_many_replicas_as_the_plan_says_and_memory_nodes_allow() -> None:
    assert store_urls(("a:1", "b:1"), "s3://kept/run", 2) == ["memory://a:1,b:1?replicas=2", "s3://kept/run"]
    assert store_urls(("a:1",), None, 2) == ["memory://a:1"]
    assert store_urls((), "s3://kept/run", 2) == ["s3://kept/run"]


def test_a_machine_starts_without_numpy() -> None:
    code = "import sys, deepvm.runtime.agent.__main__; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
