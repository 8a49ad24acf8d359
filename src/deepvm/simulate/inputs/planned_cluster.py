"""A plan file in, the machines that a simulation needs out. Reads what ``deepvm plan -o`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepvm import strict_json as strict
from deepvm.catalog.model import LEAST, LEAST_USD, MOST_USD
from deepvm.errors import MalformedFile

MOST_BYTES = 64 * 2**20
_NAME = 200  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Of the first recommendation. What a plan does not have is None."""

    workers: int | None = None
    accelerator: str | None = None
    checkpoint_bytes: int | None = None
    spot_usd: float | None = None  # an hour of one worker
    on_demand_usd: float | None = None
    work_h: float | None = None  # of these machines
    deadline_h: float | None = None
    notices: float = 0.0  # share of the losses that are announced
    notice_s: float | None = None  # from a notice to the loss, on the plan's cloud
    conduct: bool = False  # True if it says how it is run, and on what market that was replayed


def machines_of(path: Path) -> Machines:
    """Read the workers of a plan. MalformedFile if the file is something else."""
    hint = "make a plan with: deepvm plan --budget 3 -o plan.json"
    document = strict.read_file(path, most_bytes=MOST_BYTES, hint=hint)
    try:
        table = strict.table(document, "the plan")
        best = first_recommendation(table)
        roles = [strict.table(role, "a role") for role in strict.array(strict.member(best, "roles"), "roles", 1000)]
        training = [role for role in roles if role.get("role") in ("worker", "anchor")]
        worker = next(role for role in roles if role.get("role") == "worker")
        request = strict.table(strict.member(table, "request"), "request")
        work = _optional(request.get("work_eflops_h"), "work_eflops_h")
        performance = _optional(best.get("performance"), "performance", LEAST)
        deadline_s = _optional(request.get("deadline_s"), "deadline_s")
        return Machines(
            workers=sum(strict.integer(strict.member(role, "count"), "count", 0, 10_000) for role in training),
            accelerator=accelerator_of(table, worker),
            checkpoint_bytes=strict.integer(strict.member(request, "checkpoint_bytes"), "checkpoint_bytes", 0, 2**60),
            spot_usd=strict.number(strict.member(worker, "usd_per_hour"), "usd_per_hour", LEAST_USD, MOST_USD),
            on_demand_usd=_optional(
                _instance(table, worker).get("on_demand_usd"), "on_demand_usd", LEAST_USD, MOST_USD
            ),
            work_h=None if not work or not performance else work / performance,
            deadline_h=None if deadline_s is None else deadline_s / 3600,
            notices=strict.number(request.get("notices", 0.0), "notices", 0, 1),
            conduct="conduct" in best and "replay" in best,
            notice_s=_optional(strict.table(best.get("replay", {}), "replay").get("notice_s"), "notice_s"),
        )
    except (strict.MalformedJson, StopIteration) as error:
        reason = str(error) or "it has no workers"
        raise MalformedFile(path, f"not a valid plan: {reason}; {hint}") from None


def accelerator_of(plan: Mapping[str, Any], role: Mapping[str, Any]) -> str | None:
    """Return the accelerator of a role's machines, by the plan's instances. MalformedJson if they are not valid."""
    name = _instance(plan, role).get("accelerator")
    return None if name is None else strict.text(name, "accelerator", _NAME)


def _instance(plan: Mapping[str, Any], role: Mapping[str, Any]) -> Mapping[str, Any]:
    name = strict.text(strict.member(role, "instance"), "instance", _NAME)
    rows = strict.array(strict.member(plan, "instances"), "instances")
    return next((row for row in rows if strict.table(row, "an instance").get("instance") == name), {})


def first_recommendation(plan: dict[str, Any]) -> dict[str, Any]:
    rows = strict.array(strict.member(plan, "recommendations"), "recommendations")
    if not rows:
        raise strict.MalformedJson("it has no recommendations")
    return strict.table(rows[0], "a recommendation")


def _optional(value: object, name: str, least: float = 0.0, most: float = 1e15) -> float | None:
    return None if value is None else strict.number(value, name, least, most)
