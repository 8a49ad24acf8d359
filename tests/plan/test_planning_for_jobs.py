"""``deepvm plan --job``: its figures replace options, their origins are told, and no plan is too small for it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.catalog import Instance, Market
from deepvm.catalog.accelerators import find
from deepvm.catalog.library import load
from deepvm.cli.app import run
from deepvm.errors import Infeasible, UsageError
from deepvm.performance.job import Component, Job
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.roofline import Roofline, predict_step_s
from deepvm.plan import Request, explain, plan, sweep
from deepvm.plan.job_facts import USABLE_GPU_MEMORY, JobFacts, t4_step
from deepvm.plan.request import PAPER_ARCHITECTURES
from deepvm.runtime.cluster import cluster_of
from deepvm.runtime.supervise.replan import _request
from tests.support.small_markets import every_cluster, markets, requests, small_catalog

GB = 10**9
JOB = Job(
    name="train.py",
    parameters=10**9,
    trainable_parameters=10**9,
    components={"model": Component(bytes=4 * GB), "optimizer": Component(bytes=8 * GB)},
    gradient_bytes=4 * GB,
    flops_per_step=1e13,
    traffic_bytes_per_step=2e11,
    memory_bytes=20 * GB,
    memory_parts={"weights": 4 * GB, "gradients": 4 * GB, "optimizer": 8 * GB, "activations": 4 * GB},
    origins={"components": "measured", "gradient_bytes": "computed", "memory_bytes": "computed"},
)
FSDP = replace(JOB, parallel="fsdp")


def measured_on(accelerator: str | None, step_s: float) -> Job:
    machine = Machine(cpu="x", cores=8, accelerator=accelerator, accelerator_count=1 if accelerator else 0)
    return replace(JOB, step_s=Samples((step_s,) * 3), provenance=Provenance(machine=machine, date="2026-11-18"))


def test_a_jobs_figures_replace_the_defaults_and_given_ones_win() -> None:
    request = Request.for_job(JOB, budget_usd=3.0)
    assert (request.checkpoint_bytes, request.gradient_bytes) == (12 * GB, 4 * GB)
    assert request.job is not None
    assert dict(request.job.origins) == {
        "checkpoint_bytes": "measured", "gradient_bytes": "computed", "step_s": "guessed",
        "gpu_memory_bytes": "computed",
    }  # fmt: skip
    own = Request.for_job(JOB, budget_usd=3.0, checkpoint_bytes=5, gradient_bytes=6, step_s=7.0, min_gpu_memory_gb=24.0)
    assert (own.checkpoint_bytes, own.gradient_bytes, own.step_s) == (5, 6, 7.0)
    assert own.job is not None
    assert {*own.job.origins.values()} == {"given"}
    assert own.job.whole_bytes is None


def test_the_step_on_a_t4_is_measured_there_or_predicted_by_a_roofline() -> None:
    on_t4 = t4_step(measured_on("Tesla T4", 0.3))
    assert on_t4 is not None
    assert (on_t4.seconds, on_t4.origin) == (0.3, "measured")
    on_a10g = t4_step(measured_on("A10G", 0.3))
    assert on_a10g is not None
    assert on_a10g.origin == "computed"
    assert 0.3 < on_a10g.seconds < 0.6
    assert on_a10g.low_s < on_a10g.seconds < on_a10g.high_s
    uncounted = t4_step(replace(measured_on("A10G", 0.3), flops_per_step=None))
    assert uncounted is not None
    assert uncounted.origin == "guessed"
    on_cpu, counted = t4_step(measured_on(None, 100.0)), t4_step(JOB)
    assert on_cpu == counted
    assert counted is not None
    t4 = find("T4")
    assert t4 is not None
    assert counted == replace(predict_step_s(JOB, t4), origin="guessed")
    own = Roofline(compute_share=0.3, memory_share=0.5, devices=("L4",))
    by_profiles = t4_step(JOB, own)
    assert by_profiles == replace(predict_step_s(JOB, t4, roofline=own), origin="computed")
    small = t4_step(replace(JOB, flops_per_step=1e6, traffic_bytes_per_step=1e6))
    assert small is not None
    assert small.seconds == 0.002
    assert small.low_s < small.seconds < small.high_s
    half = t4_step(replace(JOB, precision="fp16"))
    assert half is not None
    assert half.seconds < counted.seconds
    assert t4_step(replace(JOB, flops_per_step=None)) is None
    assert t4_step(replace(JOB, flops_per_step=0.0)) is None
    request = Request.for_job(replace(JOB, flops_per_step=None), budget_usd=3.0)
    assert request.step_s == Request(budget_usd=3.0).step_s
    assert request.job is not None
    assert request.job.origins["step_s"] == "default"


def test_a_gpu_that_is_too_small_is_left_out_with_figures() -> None:
    catalog = load("aws-2026-08")
    found = plan(catalog, Request.for_job(JOB, budget_usd=10.0))
    memories = {i.name: i.accelerator_memory_gib for i in catalog.instances}
    assert found.instances
    assert all((memories[row.instance] or 0) * 2**30 * USABLE_GPU_MEMORY >= 20 * GB for row in found.instances)
    reasons = [out.reason for out in found.left_out]
    assert "too little GPU memory: train.py needs 22.2 GB" in reasons
    with pytest.raises(Infeasible, match=r"too little GPU memory: train\.py needs 1\.11 TB"):
        plan(catalog, Request.for_job(replace(JOB, memory_bytes=1000 * GB), budget_usd=10.0))
    assert plan(catalog, Request.for_job(JOB, budget_usd=10.0, min_gpu_memory_gb=1.0)).instances[0]


def test_with_fsdp_more_machines_hold_what_one_cannot() -> None:
    """16 GB are divided: 4 GB on every T4 leave 11.46 GB of room, so two of them do."""
    gpu = Instance(
        name="t4", vcpus=4, memory_gib=64.0, accelerator="T4", accelerator_count=1, accelerator_memory_gib=16.0,
        sustained_gbps=25.0,
    )  # fmt: skip
    node = Instance(name="cpu", vcpus=8, memory_gib=64.0, sustained_gbps=25.0)
    catalog = small_catalog([gpu, node], [(0, 0, 0.5), (1, 0, 0.1)], [(0, 0, 0.2)])
    request = Request.for_job(FSDP, budget_usd=0.65, architectures=("tiering",), checkpoint_every_s=600.0)
    best = plan(catalog, request).recommendations
    assert [r.worker.count for r in best] == [2]
    with pytest.raises(Infeasible, match=r"the cheapest plan costs \$0\.5000/h") as failed:
        plan(catalog, replace(request, budget_usd=0.4))
    assert failed.value.cheapest_usd == pytest.approx(0.5)
    with pytest.raises(Infeasible, match=r"no cluster meets 20 GB of GPU memory for train\.py or --max-nodes 1, at"):
        plan(catalog, replace(request, max_nodes=1, checkpoint_bytes=0))
    with pytest.raises(Infeasible, match="too little GPU memory"):
        plan(catalog, Request.for_job(JOB, budget_usd=10.0))
    eight = replace(gpu, accelerator_count=8)
    together = small_catalog([eight, node], [(0, 0, 0.5), (1, 0, 0.1)], [(0, 0, 0.2)])
    assert [r.worker.count for r in plan(together, replace(request, budget_usd=0.4)).recommendations] == [1]
    points = sweep(catalog, request, [0.4, 0.65], ["deepvm"])
    assert [point.count for point in points] == [None, 2]


@given(whole=st.integers(0, 2**36), sharded=st.integers(0, 2**40), gib=st.floats(0.5, 200), gpus=st.integers(1, 4096))
def test_the_fewest_gpus_hold_the_job_and_one_less_does_not(whole: int, sharded: int, gib: float, gpus: int) -> None:
    job = JobFacts(name="j", whole_bytes=whole, sharded_bytes=sharded, origins={})
    room = gib * 2**30 * USABLE_GPU_MEMORY
    least = job.least_gpus(gib)
    if math.isinf(least):
        assert whole >= room
        return
    assert whole + sharded / least <= room * (1 + 1e-9)
    if least > 1:
        assert whole + sharded / (least - 1) > room * (1 - 1e-9)
    assert JobFacts(name="j", origins={}).least_gpus(gib) == 1
    assert JobFacts(name="j", whole_bytes=1, origins={}).least_gpus(None) == math.inf


@settings(max_examples=40, deadline=None)
@given(
    catalog=markets(),
    request=requests(objective="throughput", policy="deepvm", deadline_s=None),
    nodes=st.integers(1, 5),
)
def test_the_search_with_a_job_is_that_over_the_clusters_that_hold_it(catalog, request, nodes) -> None:
    """Every GPU of these markets has 16 GiB."""
    room = 16 * 2**30 * USABLE_GPU_MEMORY
    job = JobFacts(name="j", whole_bytes=0, sharded_bytes=int(room * (nodes - 0.5)), origins={})
    gpus = [instance.accelerator_count for instance in catalog.instances]
    fitting = [
        c
        for c in every_cluster(catalog, request)
        if c.nodes * gpus[c.worker] >= nodes and c.usd <= request.budget_usd + 1e-6
    ]
    try:
        best = plan(catalog, replace(request, job=job)).recommendations[0]
    except Infeasible:
        assert not fitting
        return
    assert best.nodes * {i.name: i.accelerator_count for i in catalog.instances}[best.worker.instance] >= nodes
    assert best.performance == pytest.approx(max(c.performance for c in fitting), rel=1e-9)


def test_a_mixed_cluster_holds_the_job_too() -> None:
    def gpu(name: str, gib: float, eflops: float) -> Instance:
        return Instance(
            name=name, vcpus=4, memory_gib=64.0, accelerator="T4", accelerator_count=1, accelerator_memory_gib=gib,
            eflops=eflops, sustained_gbps=25.0,
        )  # fmt: skip

    on_demand, spot = [(0, 0, 0.6), (1, 0, 1.0)], [(0, 0, 0.3), (1, 0, 0.5)]
    catalog = small_catalog([gpu("small", 4.0, 300.0), gpu("large", 48.0, 500.0)], on_demand, spot)
    request = Request.for_job(
        JOB, budget_usd=1.3, architectures=("all-spot",), mixed=True, checkpoint_bytes=10**6, step_s=3.5
    )
    for best in plan(catalog, request).recommendations:
        assert {role.instance for role in best.roles} == {"large"}
    free = replace(request, job=None)
    assert {role.instance for role in plan(catalog, free).recommendations[0].roles} == {"small", "large"}


def test_the_explanation_names_the_origin_of_each_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    JOB.write(path)
    words = ["plan", "--budget", "10", "--job", str(path), "--explain", "--checkpoint-size", "6GB"]
    assert run([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    figures = {row["name"]: row for row in document["explanation"]["figures"]}
    assert {name: row["origin"] for name, row in figures.items()} == {
        "checkpoint_bytes": "given", "gradient_bytes": "computed", "step_s": "guessed",
        "gpu_memory_bytes": "computed",
    }  # fmt: skip
    assert figures["checkpoint_bytes"]["value"] == 6 * GB
    assert figures["step_s"]["low"] < figures["step_s"]["value"] < figures["step_s"]["high"]
    assert document["request"]["job"]["name"] == "train.py"
    assert run(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "checkpoint 6 GB, given" in shown
    assert "gradients 4 GB, computed" in shown
    assert "GPU memory 20 GB, computed" in shown


def test_a_replan_of_a_run_keeps_to_the_job() -> None:
    catalog = load("aws-2026-08")
    request = Request.for_job(FSDP, budget_usd=10.0)
    document = json.loads(json.dumps(plan(catalog, request).to_json()))
    assert _request(cluster_of(document, "plan.json")) == replace(request, architectures=PAPER_ARCHITECTURES)
    document["request"]["job"]["whole_bytes"] = "much"
    with pytest.raises(UsageError, match="the plan's job cannot be read"):
        _request(cluster_of(document, "plan.json"))


def test_a_plan_without_a_job_has_no_figures_and_is_as_before() -> None:
    catalog = load("paper-aws-2023")
    found = plan(catalog, Request(budget_usd=3.0))
    assert explain(catalog, found, date(2026, 8, 22)).figures == ()
    assert found.request.job is None
    assert np.isfinite(catalog.prices[Market.SPOT].usd_per_hour).all()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--job", "nothing.json"], "nothing.json: it cannot be read"),
        (["--job", "a.json", "--model", "gpt2"], "--job and --model exclude each other"),
        (["--precision", "bf16"], "--precision has no effect without --model"),
        (["--parallel", "fsdp"], "--parallel has no effect without --job or --model"),
        (["--model", "gpt9", "--parallel", "magic"], "no parallelism is called 'magic'"),
    ],
)
@pytest.mark.parametrize("command", [["plan", "--budget", "3"], ["sweep"]])
def test_options_of_jobs_that_do_not_fit_together_are_refused(
    command: list[str], words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, *words]) == 2
    assert expected in capsys.readouterr().err.replace("\n", " ")


def test_an_empty_job_is_refused() -> None:
    with pytest.raises(UsageError, match="has no parameters to save"):
        Request.for_job(replace(JOB, components={}), budget_usd=3.0)


def test_sweep_takes_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    JOB.write(path)
    assert run(["sweep", "--from", "1", "--to", "10", "--step", "3", "--job", str(path), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    memories = {i.name: i.accelerator_memory_gib for i in load("aws-2026-08").instances}
    chosen = [point["instance"] for point in points if point["instance"]]
    assert chosen
    assert all((memories[name] or 0) * 2**30 * USABLE_GPU_MEMORY >= 20 * GB for name in chosen)
