"""``deepvm simulate plan.json``: a plan and options in, its own conduct replayed beside other strategies out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepvm.cli.risk.shown import conduct_text
from deepvm.cli.simulate.job_options import Settings
from deepvm.market.trace import load_traces
from deepvm.plan.rehearsal.beside import beside
from deepvm.plan.rehearsal.planned import Planned, read_planned
from deepvm.simulate import Backtests
from deepvm.units import format_usd


def replayed(settings: Settings, *, strategies: Sequence[str], traces: Path | None, progress: Any) -> Backtests:
    given = settings.given
    assert settings.plan is not None  # noqa: S101 - its conduct was read
    found = read_planned(settings.plan)
    assert found is not None  # noqa: S101 - its conduct was read
    planned = _with_options(found, settings)
    notes = [f"planned: the plan's own conduct, {conduct_text(planned.conduct, planned.job.machines)}"]
    if planned.expected_usd is not None and planned.expected_h is not None:
        notes.append(f"the plan expected {format_usd(planned.expected_usd)} and {planned.expected_h:.2f} h on average")
    recorded = None if found.market is None else found.market.traces
    if traces is not None:
        planned = planned.on_traces(load_traces(traces, meaning=settings.meaning))
    elif recorded is not None:
        notes.append(f"the plan was replayed on the traces {recorded}, and this is the built-in market: give --traces")
    if planned.market is not None:
        rests = [f"the market rests on {planned.market.history}"] if planned.market.history.enough else []
        notes += [*rests, *planned.market.notes]
    shared = {name: settings.replayed[name] for name in ("rates", "confidence")}
    seed = 0 if given.seed is None else given.seed
    return beside(planned, strategies=strategies, notes=notes, seed=seed, progress=progress, **shared)


def _with_options(found: Planned, settings: Settings) -> Planned:
    """Return the plan with what was given instead of its own figures."""
    given = settings.given
    job = found.job
    work_h = job.work_h if given.work_h is None else given.work_h
    deadline_h = job.deadline_h if given.deadline_h is None else given.deadline_h
    planned = replace(found, job=replace(job, work_h=work_h, deadline_h=deadline_h))
    planned = planned.priced(settings.spot_usd, settings.on_demand_usd).measured(given.profiles)
    planned = planned.told(given.notices, given.notice_s)
    planned = planned if given.starts is None else planned.started(given.starts)
    return planned if given.seed is None else planned.seeded(given.seed)
