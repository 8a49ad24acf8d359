"""The policies of a run: a plan's conduct and the user's options in; texts, and who chose each, out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from deepvm.errors import UsageError
from deepvm.market.builtin import classes_of
from deepvm.policy import AllOf, AnyOf, SavePolicy, YoungDaly, parse_after_loss, parse_policy
from deepvm.policy.conduct import Conduct
from deepvm.runtime.cluster import Cluster, cluster_of
from deepvm.runtime.run_spec import RunSpec

Origin = Literal["command line", "plan", "default"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Fields of ``RunSpec``."""

    policy: str
    after_loss: str
    replan_threshold: float | None
    origins: Mapping[str, Origin]


def choose_policies(
    conduct: Conduct | None, *, policy: str | None, after_loss: str | None, replan_threshold: str | None = None
) -> Chosen:
    """Return the policies of a run: the user's, else the plan's, else the default.

    A plan that trains in one of several zones was replayed with moves to a cheaper one, so such a run moves, too."""
    plan = conduct or Conduct()
    planner: Origin = "default" if conduct is None else "plan"
    way_back = plan.cheapest_up().way_back
    planned = None if way_back is None or len(plan.zones) < 2 else 1 - way_back
    return Chosen(
        policy=plan.save if policy is None else policy,
        after_loss=plan.after_loss if after_loss is None else after_loss,
        replan_threshold=planned if replan_threshold is None else parse_threshold(replan_threshold),
        origins={
            "policy": planner if policy is None else "command line",
            "after_loss": planner if after_loss is None else "command line",
        },
    )


def parse_threshold(text: str) -> float | None:
    """Parse ``20%``, or ``never``, which is None."""
    if text.strip().lower() == "never":
        return None
    try:
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UsageError(f"{text!r} is not a valid threshold: write it like 20%, between 0% and 100%, or never")
    return share


def replicas_of(conduct: Conduct | None) -> int:
    """Return how many replicas of a checkpoint the memory nodes keep; also of those beside a durable store."""
    return 1 if conduct is None else max(1, conduct.replicas)


def losses_per_h(cluster: Cluster) -> float | None:
    """Return how often the market of a plan takes machines of its gang, in an hour of training: the built-in figures of
    the workers' accelerator. None if no machine that trains is on spot."""
    worker = next((machine for machine in cluster.trainers if machine.market == "spot"), None)
    if worker is None:
        return None
    rows = cluster.plan.get("instances", ())
    named = next((row.get("accelerator") for row in rows if row.get("instance") == worker.instance), None)
    classes = classes_of(named)
    up_h = sum(row.history.zones * row.availability for row in classes)
    return sum(row.history.zones * row.availability / row.spells.up.mean_h for row in classes) / up_h


def with_hazard(text: str, per_hour: float | None) -> str:
    """Return the text of a save policy, in which every Young/Daly without a hazard of its own has this one."""
    policy = parse_policy(text)
    found = policy if per_hour is None else _with_hazard(policy, per_hour / 3600)
    return text if found == policy else str(found)


def _with_hazard(policy: SavePolicy, per_s: float) -> SavePolicy:
    if isinstance(policy, YoungDaly) and policy.hazard_per_s is None:
        return replace(policy, hazard_per_s=per_s)
    if isinstance(policy, AnyOf | AllOf):
        return type(policy)(*(_with_hazard(part, per_s) for part in policy.policies))
    return policy


def scaled_after_loss(spec: RunSpec, cluster: Cluster) -> str:
    """Return what to do at a loss on a part of the plan's machines: its least number of workers is the same share."""
    if spec.origins.get("after_loss") != "plan":
        return spec.after_loss
    planned = len(cluster_of(cluster.plan, "the plan", rank=spec.rank).trainers)
    policy = parse_after_loss(spec.after_loss)
    return str(replace(policy, least=max(1, math.ceil(policy.least * len(cluster.trainers) / max(1, planned)))))


def conduct_facts(spec: RunSpec, cluster: Cluster) -> dict[str, Any]:
    """Return what ``run-started`` records about the policies that the run follows."""
    return {
        "save": {"policy": with_hazard(spec.policy, losses_per_h(cluster)), "by": spec.origins.get("policy")},
        "after_loss": {"policy": scaled_after_loss(spec, cluster), "by": spec.origins.get("after_loss")},
        "zones": list(cluster.conduct.zones) if cluster.conduct is not None else [],
        "fallback": cluster.conduct.fallback if cluster.conduct is not None else "none",
        "deadline_s": cluster.deadline_s,
        "replan_threshold": spec.replan_threshold,
    }
