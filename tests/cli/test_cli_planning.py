"""The command line as its users meet it: words in; tables, one JSON document, or one sentence out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepvm.catalog import load
from deepvm.cli.app import run
from deepvm.cli.options import with_quotas
from deepvm.plan import Request
from deepvm.plan.search.instances import analyse_instances

DEEPVM = str(Path(sys.executable).with_name("deepvm"))
TABLE_IV = "plan --budget 3 --catalog paper-aws-2023 --checkpoint-size 300MB --buffers 2 --objective flopp"


def deepvm(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DEEPVM, *words.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_table_iv_as_json() -> None:
    done = deepvm(f"{TABLE_IV} --json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["format"] == "deepvm-plan/1"
    assert document["request"]["budget_usd"] == 3
    for best, memory in zip(document["recommendations"], ("c5.xlarge", "m6i.xlarge", "c5n.xlarge"), strict=True):
        assert best["architecture"] == "tiering"
        workers, node = best["roles"]
        assert (workers["role"], workers["instance"], workers["market"], workers["count"]) == (
            "worker", "g4dn.xlarge", "spot", 17,
        )  # fmt: skip
        assert workers["usd_per_hour"] == 0.1578
        assert (node["role"], node["instance"], node["market"], node["count"]) == ("memory", memory, "on-demand", 1)
        assert best["objective"]["name"] == "flopp"
    assert document["recommendations"][0]["hourly_usd"] == pytest.approx(2.8526)


def test_the_sweep_has_every_policy_at_every_budget() -> None:
    done = deepvm("sweep --catalog paper-virtual --checkpoint-size 500MB --buffers 2 --json")
    points = json.loads(done.stdout)["points"]
    assert len(points) == 101 * 4
    assert list(points[0]) == ["policy", "budget", "architecture", "instance", "count", "hourly_usd", "performance"]
    assert points[0]["performance"] is None
    at_three = next(p for p in points if p["policy"] == "deepvm" and p["budget"] == 3.0)
    assert (at_three["instance"], at_three["count"]) == ("D", 17)
    assert at_three["performance"] == pytest.approx(11230.6, abs=0.05)


def test_the_four_stages_are_shown_and_fit_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    done = deepvm("plan --budget 3 --explain --pareto", COLUMNS="60")
    assert done.returncode == 0
    for stage in ("1 Request", "2 Instances", "3 Architectures", "4 Decision", "Explanation", "Pareto front"):
        assert stage in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 60
    assert "2026-08-22" in done.stdout
    assert "after a loss" in " ".join(done.stdout.split())
    assert "$1/h more buys nothing" in " ".join(done.stdout.split())


def test_what_a_dollar_more_would_buy_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--budget", "2", "--catalog", "paper-virtual", "--explain"]) == 0
    assert re.search(r"\$1/h more \+\d+\.\d%, with \d+ × ", " ".join(capsys.readouterr().out.split()))


def test_a_plan_says_where_it_was_written_if_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--budget", "2", "--catalog", "paper-virtual"]
    assert run(words) == 0
    assert "written to" not in capsys.readouterr().out
    assert run([*words, "-o", str(tmp_path / "plan.json")]) == 0
    assert f"written to {tmp_path / 'plan.json'}" in capsys.readouterr().out


def test_types_that_a_plan_leaves_out_are_counted_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (([], ""), (["--min-gpu-memory", "20"], "GPU")):
        assert run(["plan", "--budget", "3", "--catalog", "paper-aws-2023", *words]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert bool(re.search(rf"left out: \d+ .*{reason}", shown)) == bool(words), shown


def test_the_memory_that_is_given_wins_over_that_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--budget", "3", "--model", "gpt2", "--batch", "4096"]
    assert run(words) == 3
    assert "too little GPU memory" in capsys.readouterr().err
    assert run([*words, "--min-gpu-memory", "16", "--explain"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "GPU memory 16 GB, given" in shown
    assert "too little GPU memory" not in shown


def test_a_quota_whose_raise_would_help_is_explained_with_what_it_buys(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --budget 3 --catalog paper-aws-2023 --quota G:spot=16 --explain"
    assert run(words.split()) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"quota raising G spot from 16 to \d+ vCPUs buys \+\d+\.\d%", shown), shown


def test_a_batch_limit_is_planned_swept_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    limit = "--batch 32 --global-batch 128 --gpu T4 --json"
    assert run(f"plan --budget 20 --explain {limit}".split()) == 0
    document = json.loads(capsys.readouterr().out)
    best = document["recommendations"][0]
    assert document["request"]["global_batch"] == 128
    assert best["curves"][0]["model"] == "limited-batch"
    assert best["nodes"] < 20
    assert "samples on each of" in document["explanation"]["batch"]
    assert document["explanation"]["links"][0].startswith(f"{best['roles'][0]['instance']}: ")
    assert run(f"sweep --from 20 --to 20 --step 1 --policy deepvm {limit}".split()) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert (point["count"], point["performance"]) == (best["nodes"], best["performance"])


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("plan --budget -1", 2, "must be finite and not negative"),
        ("plan --budget nan", 2, "must be finite and not negative"),
        ("plan --budget lots", 2, "not an amount of money"),
        ("plan", 2, "--budget"),
        ("plan --budget 3 --catalog paper-virtul", 2, "did you mean paper-virtual"),
        ("plan --budget 3 --policy cheap", 2, "no policy is called 'cheap'"),
        ("plan --budget 3 --checkpoint-size 3XB", 2, "is not a size"),
        ("plan --budget 3 --quota G=1", 2, "write it like G:spot=128"),
        ("plan --budget 3 --work 3h@nothing", 2, "no instance type is called 'nothing'"),
        ("plan --budget 3 --work 3h@c5.xlarge", 2, "no accelerator of known speed"),
        ("plan --budget 3 --objective cost", 2, "--work"),
        ("plan --budget 3 --architecture tierin", 2, "did you mean tiering"),
        ("plan --budget 3 --catalog /nowhere.json", 2, "cannot be read"),
        ("plan --budget 0.2 --catalog paper-virtual", 3, "the cheapest plan costs $0.2324/h"),
        ("plan --budget 0", 3, "the cheapest plan costs"),
        ("sweep --from 5 --to 1", 2, "cannot sweep from"),
        ("sweep --step 0", 2, "cannot sweep from"),
        ("sweep --to 1e9", 2, "use a larger step"),
        ("sweep --policy nobody", 2, "no policy is called"),
        ("plann", 2, "plan"),
        ("plan --budget 3 --nonsense", 2, "--nonsense"),
        ("plan --budget 3 --quota GG:spot=16", 2, "no quota family of this catalogue is called 'GG'"),
        ("plan --budget 3 --quota G/Q9:spot=16", 2, "called 'Q9'"),
        ("plan --budget 3 --min-gpu-memory big", 2, "write it like 24 or 24GB"),
        ("plan --budget 3 --min-gpu-memory 0", 2, "above zero"),
        ("plan --budget 3 --global-batch 64", 2, "--global-batch needs --batch too"),
        ("plan --budget 3 --batch 8 --global-batch 0", 2, "global_batch is 0: it must be 1 or more"),
        ("plan --budget 3 --batch 8 --global-batch -8", 2, "it must be 1 or more"),
        (f"plan --budget 3 --batch 8 --global-batch 1{'0' * 400}", 2, "most samples"),
        ("plan --budget 3 --batch 8 --global-batch 64 --mixed", 2, "cannot be combined"),
        ("plan --budget 99 --gpu A100 --batch 8 --global-batch 4", 3, "no cluster meets --global-batch 4"),
        ("sweep --to 1 --global-batch 64", 2, "--global-batch needs --batch too"),
        ("plan --budget 3 --budget 4", 2, "--budget is given 2 times: it takes one value"),
        ("catalog update --source aws --region us-east-1 --region us-west-2", 2, "--region is given 2 times"),
        ("checkpoint ls file:///nowhere --run a --run b", 2, "--run is given 2 times"),
        ("plan --budget 3 --region us-east-1 --region us-est-1", 2, "did you mean us-east-1"),
    ],
)
def test_bad_input_gets_one_sentence_and_its_exit_code(
    words: str, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words.split()) == code
    shown = capsys.readouterr()
    assert sentence in shown.err.replace("\n", " ")
    assert shown.out == ""
    assert "Traceback" not in shown.err


def test_errors_under_json_are_one_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--budget", "0.2", "--catalog", "paper-virtual", "--json"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 3
    assert error["cheapest_usd"] == pytest.approx(0.2324)


@pytest.mark.parametrize(
    ("text", "line"),
    [('{\n"format": "deepvm-catalog/1",\n oops}', "line 3"), ("{}", "format"), ('{"format": "other/9"}', "other/9")],
)
def test_a_malformed_catalogue_is_reported_with_its_place(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert run(["plan", "--budget", "3", "--catalog", str(path)]) == 2
    assert line in capsys.readouterr().err


def test_a_plan_is_written_to_a_file_and_a_bad_place_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert run(["plan", "--budget", "3", "-o", str(path)]) == 0
    assert json.loads(path.read_text())["recommendations"][0]["rank"] == 1
    assert run(["plan", "--budget", "3", "-o", str(tmp_path / "no" / "plan.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_sweep_into_a_pipe_is_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", "--from", "1", "--to", "2", "--step", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "policy,budget,architecture,instance,count,hourly_usd,performance"
    assert len(lines) == 1 + 3 * 4


def test_quotas_on_the_command_line_bind(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--budget", "3", "--gpu", "T4", "--quota", "G:spot=16", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["recommendations"][0]
    assert sum(r["count"] for r in best["roles"] if r["market"] == "spot") <= 4


@pytest.mark.parametrize(
    ("asked", "least", "left_out"),
    [
        ("24", {"L4", "A10G", "L40S", "A100", "B200"}, {"T4"}),
        ("24GB", {"L4", "A10G"}, {"T4"}),
        ("24GiB", {"L4", "A10G"}, {"T4"}),
        ("48", {"L40S", "A100-80GB"}, {"L4", "A100"}),
        ("16384MiB", {"T4"}, set()),
        ("180", {"B200"}, {"H200"}),
    ],
)
def test_gpu_memory_is_asked_for_as_gpus_are_sold(
    asked: str, least: set[str], left_out: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--budget", "500", "--min-gpu-memory", asked, "--json"]) == 0
    found = {row["accelerator"] for row in json.loads(capsys.readouterr().out)["instances"]}
    assert least <= found
    assert not left_out & found


@pytest.mark.parametrize(
    ("quotas", "bound"),
    [
        (["P5:spot=0"], "p5. p5en. p6-"),
        (["P5EN:spot=0"], "p5en."),
        (["P:spot=0"], "p4d. p4de. p5. p5en. p6-"),
        (["P:spot=0", "P5:spot=1000"], "p4d. p4de."),
        (["g6:spot=0"], "g6. g6e."),
        (["G/P:spot=0", "G4dn:spot=1000"], "g5. g6. g6e. p4d. p4de. p5. p5en. p6-"),
    ],
)
def test_a_quota_covers_every_type_of_its_family_and_generation(quotas: list[str], bound: str) -> None:
    catalog = load("aws-2026-08")
    workers = analyse_instances(catalog, Request(budget_usd=500, quotas=with_quotas(catalog, quotas))).workers
    none_left = {catalog.instances[i].name for i in workers.instance[workers.spot_limit < 1]}
    machines = {catalog.instances[i].name for i in workers.instance}
    assert none_left == {name for name in machines if name.startswith(tuple(bound.split()))}


def test_regions_zones_and_gpus_may_be_several(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--budget", "3", "--json", "--region", "us-east-1", "--gpu", "t4", "--gpu", "NVIDIA L4"]
    assert run(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["accelerator"] for row in document["instances"]} == {"T4", "L4"}
    assert document["request"]["region"] == "us-east-1"
    assert document["request"]["gpu"] == ["t4", "NVIDIA L4"]


def test_help_and_version_and_completion_work() -> None:
    assert "plan" in deepvm("--help").stdout
    assert deepvm("--version").stdout.startswith("deepvm 0.")
    assert "--budget" in deepvm("plan --help").stdout
    assert "deepvm" in deepvm("--show-completion bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout


def test_importing_deepvm_pulls_in_nothing_heavy() -> None:
    code = (
        "import sys, deepvm;"
        "print({'torch', 'boto3', 'botocore', 'matplotlib', 'scipy', 'numpy', 'typer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "set()\n"


def test_catalogues_are_joined_and_prices_may_be_a_percentile() -> None:
    done = deepvm("plan --budget 3 --catalog aws-2026-08 --catalog aws-2026-08 --price p75 --json", DEEPVM_HOME="/none")
    document = json.loads(done.stdout)
    assert document["catalog"] == "aws-2026-08"
    assert "no price history" in document["notes"][-1]
    assert "no price history" in done.stderr
    for words, told in (
        ("--price 75", "'75' is not a valid percentile of prices: write p0 to p100"),
        ("--price p101", "'p101' is not a valid percentile"),
        ("--vendor nvida", "did you mean nvidia"),
        ("--market-gpus 0", "market_gpus is 0: it must be 1 or more"),
        ("--losses-per-hour -1", "losses_per_h is -1: it must be a finite number of zero or more"),
        ("--catalog aws --catalog paper-virtual", "paper-virtual is made for the paper's network table"),
    ):
        refused = deepvm(f"plan --budget 3 {words}", DEEPVM_HOME="/none")
        assert refused.returncode in (1, 2), words
        assert told in " ".join(refused.stderr.split()), words


def test_aws_says_that_the_built_in_catalogue_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    for words, said in (("--catalog aws", True), ("", False)):
        assert run(f"plan --budget 3 {words}".split()) == 0
        assert ("aws is aws-2026-08 here, as no skypilot-aws" in " ".join(capsys.readouterr().out.split())) == said
