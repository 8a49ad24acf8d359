"""``deepvm run --on ec2`` and ``--on skypilot`` from the command line to the cloud and back: start, follow, end.

EC2 is a moto server on loopback, which real calls of boto3 reach; SkyPilot's server is played in memory.
"""

from __future__ import annotations

import base64
import fcntl
import gzip
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deepvm
from deepvm.cli.app import run as deepvm_command
from deepvm.errors import DeepvmError
from deepvm.events import Event
from deepvm.policy.conduct import LAST_MOMENT, Conduct, Fallback
from deepvm.runtime.backends.ec2 import backend as ec2_module
from deepvm.runtime.cluster import load_cluster
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise import cloud_run, cloud_supervisor
from tests.support.runtime import ec2_server
from tests.support.runtime.sky_stand_in import Sky
from tests.support.waiting import wait_until

NAMES = ["memory/0", "worker/0", "worker/1", "worker/2"]
RANK = 2  # three spot g4dn.xlarge and a memory node for $1.2497/h
SKY = ("ask_every_s=0.001", "down_within_s=5")
KEY = "the-key-of-this-run-8Zt"
CHANGES = re.compile("Create|Authorize|Modify|Delete|Terminate")


@pytest.fixture(scope="module")
def relay() -> Iterator[ec2_server.Relay]:
    pytest.importorskip("boto3")
    with ec2_server.account() as found:
        yield found


@pytest.fixture
def ec2(relay: ec2_server.Relay) -> ec2_server.Relay:
    relay.tidy()
    return relay


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> Sky:
    found = Sky(arrives=True)
    monkeypatch.setitem(sys.modules, "sky", found)
    return found


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    plan = deepvm.make_plan(deepvm.load_catalog("aws-2026-08"), deepvm.Request(budget_usd=1.3))
    return plan.to_json()


@pytest.fixture
def here(
    tmp_path: Path, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """A folder with a plan and a script, where runs are kept, too, and looked after often."""
    (tmp_path / "plan.json").write_text(json.dumps(document))
    (tmp_path / "train.py").write_text("print('trains')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEEPVM_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(cloud_supervisor, "POLL_S", 0.1)
    monkeypatch.setattr(cloud_supervisor, "RETRY_S", 0.05)
    monkeypatch.setattr(ec2_module, "TROUBLE_EVERY_S", 0.0)
    return tmp_path


def eventually(ready: Callable[[], Any], what: str) -> None:
    """Looked at now and then: a ledger is opened each time."""
    wait_until(ready, what, every_s=0.05)


def runs(here: Path) -> list[str]:
    return sorted(path.name for path in (here / "runs").glob("*"))


def on_moto(ec2: ec2_server.Relay) -> list[str]:
    return [f"image={ec2_server.IMAGE}", f"endpoint_url={ec2.url}", "release-s=5", "zone=us-east-1c"]


def words(on: str, options: list[str], *more: str) -> list[str]:
    given = [word for option in options for word in ("--set", option)]
    return ["run", "plan.json", "--rank", str(RANK), "--on", on, "--name", "r1", *given, *more, "--", "train.py"]


def events(here: Path, kind: str | None = None) -> list[Event]:
    with Ledger.open(here / "runs" / "r1" / "ledger.sqlite") as ledger:
        return list(ledger.events(kind))


def up(here: Path) -> dict[str, str]:
    """The machines that are up by the ledger, and their types."""
    found: dict[str, str] = {}
    for event in events(here):
        if event.kind == "machine-up":
            found[str(event.machine)] = event.data["instance"]
        elif event.kind == "machine-down":
            found.pop(str(event.machine), None)  # it may never have come up
    return found


@contextmanager
def started(on: str, options: list[str], here: Path) -> Iterator[list[str]]:
    """A run that a thread follows; what it says. It must have ended, and without an error, when this is left."""
    said: list[str] = []
    errors: list[BaseException] = []
    settings = RunSpec(script="train.py", rank=RANK)

    def follow() -> None:
        try:
            cluster = load_cluster("plan.json", rank=RANK)
            cloud_run.run_cloud(on, cluster, settings, "r1", options=options, dry_run=False, show=said.append)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        eventually(lambda: errors or (said and len(up(here)) == 4), "all are up")
        assert errors == []
        yield said
    finally:
        for folder in (here / "runs").glob("*"):
            (folder / "ending").touch()
        thread.join(30)
    assert errors == []
    assert not thread.is_alive()


# --- rehearsals and refusals --------------------------------------------------------------------------------------


def test_a_dry_run_prints_every_call_that_a_start_makes_and_leaves_nothing(
    ec2: ec2_server.Relay, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deepvm_command(words("ec2", on_moto(ec2), "--dry-run")) == 0
    shown = [json.loads(line)["operation"] for line in capsys.readouterr().out.splitlines()]
    assert (ec2.requests, runs(here)) == ([], [])
    assert deepvm_command(words("ec2", on_moto(ec2), "--dry-run", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["dry_run"]) == ("r1", True)
    assert [json.loads(line)["operation"] for line in told["said"]] == shown
    assert (ec2.requests, runs(here)) == ([], [])
    with started("ec2", on_moto(ec2), here):
        made = [action for action in ec2.actions if CHANGES.match(action)]
    assert [word.replace("_", "") for word in shown] == [action.lower() for action in made[: len(shown)]]
    assert set(made[len(shown) :]) == {"CreateTags"}  # names, for machines that came by themselves
    cloud_run.end("r1")


def test_a_dry_run_on_skypilot_prints_its_task_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert deepvm_command(words("skypilot", [], "--dry-run")) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("# r1-")] == ["# r1-workers.yaml", "# r1-memory.yaml"]
    assert 'instance_type: "g4dn.xlarge"' in out
    assert runs(here) == []


def test_without_a_rank_the_best_of_the_plan_is_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words_without = ["run", "plan.json", "--on", "skypilot", "--name", "r1", "--dry-run", "--", "train.py"]
    assert deepvm_command(words_without) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("# r1-")] == [
        "# r1-workers.yaml",
        "# r1-anchor.yaml",
    ]
    assert "num_nodes: 2" in shown, "two workers beside the anchor"


@pytest.mark.parametrize(
    ("on", "option", "told"),
    [
        ("ec2", "regoin=us-east-1", "no setting is called 'regoin': did you mean region"),
        ("ec2", "region", "'region' is not a valid setting: write it like --set region=us-east-1"),
        ("ec2", "volume_gb=large", "volume_gb is 'large': it must be a whole number"),
        ("ec2", "max-usd=nan", "max_usd is 'nan': it must be a number"),
        ("ec2", "max-usd=-1", "max_usd is -1.0: it must be a number above 0"),
        ("ec2", "image=ubuntu", "the image 'ubuntu' is neither an AMI"),
        ("skypilot", "disk_gb=0", "must be at least 1"),
        ("skypilot", "ask_every_s=inf", "ask_every_s is 'inf': it must be a number"),
        ("skypilot", "spot=yes", "no setting is called 'spot'"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_wrong_setting_gets_one_sentence_and_leaves_no_folder(
    here: Path, sky: Sky, capsys: pytest.CaptureFixture[str], on: str, option: str, told: str, more: list[str]
) -> None:
    assert deepvm_command(words(on, [option], *more)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in shown.err
    assert shown.err.count("\n") == 1
    assert runs(here) == []


def test_settings_become_what_their_fields_are() -> None:
    from deepvm.runtime.backends.ec2.settings import Ec2Settings
    from deepvm.runtime.backends.skypilot.tasks import SkyPilotSettings

    given = cloud_run.parse_options(Ec2Settings, ["volume-gb=50", "max_usd=2.5", "package=a==1"])
    assert given == Ec2Settings(volume_gb=50, max_usd=2.5, package="a==1")
    given = cloud_run.parse_options(SkyPilotSettings, ["packages=torch,./a.whl", "workdir=/src", "cloud=gcp"])
    assert given == SkyPilotSettings(packages=("torch", "./a.whl"), workdir=Path("/src"), cloud="gcp")


@pytest.mark.parametrize("word", [["--preempt", "at:5s:worker/0"], ["--isolate"], ["--workers", "2"], ["--seed", "7"]])
def test_what_is_for_machines_played_here_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], word: list[str]
) -> None:
    assert deepvm_command(words("ec2", [], *word)) == 2
    assert f"{word[0]}" in capsys.readouterr().err
    assert runs(here) == []


# --- the run's key ------------------------------------------------------------------------------------------------


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.parametrize("on", ["ec2", "skypilot"])
def test_a_dry_run_names_the_runs_key_and_does_not_show_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on: str
) -> None:
    monkeypatch.setenv("DEEPVM_RUN_KEY", KEY)
    image = [f"image={ec2_server.IMAGE}"] if on == "ec2" else []
    assert deepvm_command(words(on, image, "--dry-run")) == 0
    shown = capsys.readouterr()
    assert "DEEPVM_RUN_KEY" in shown.out
    assert KEY not in shown.out + shown.err


def test_the_runs_key_reaches_every_machine_of_ec2_and_no_file_here(
    ec2: ec2_server.Relay, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPVM_RUN_KEY", KEY)
    with started("ec2", on_moto(ec2), here) as said:
        found = ec2.client.describe_launch_templates()["LaunchTemplates"]
        assert len(found) == 2  # for the hub's machine, and for all others
        for template in found:
            (version,) = ec2.client.describe_launch_template_versions(LaunchTemplateId=template["LaunchTemplateId"])[
                "LaunchTemplateVersions"
            ]
            data = base64.b64decode(version["LaunchTemplateData"]["UserData"]).decode()
            block = data.split("gunzip > /etc/deepvm/environment\n")[1].split("\nDEEPVM")[0]
            assert gzip.decompress(base64.b64decode(block)).decode() == f'DEEPVM_RUN_KEY="{KEY}"\n'
        assert files_with(KEY, here) == []
        assert KEY not in "".join(said)
        cloud_run.end("r1")


def test_the_runs_key_is_a_secret_of_every_task_of_skypilot_and_in_no_file_here(
    sky: Sky, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPVM_RUN_KEY", KEY)
    with started("skypilot", list(SKY), here) as said:
        assert len(sky.tasks) == 4
        assert {task.secrets["DEEPVM_RUN_KEY"] for task in sky.tasks.values()} == {KEY}
        assert not any(KEY in value for task in sky.tasks.values() for value in task.envs.values())
        assert files_with(KEY, here) == []
        assert KEY not in "".join(said)
        cloud_run.end("r1")


# --- a run, from its start to its end -----------------------------------------------------------------------------


def test_a_run_is_followed_into_the_ledger_and_down_leaves_nothing_of_it(
    ec2: ec2_server.Relay, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started("ec2", on_moto(ec2), here) as said:
        assert sorted(up(here)) == NAMES
        assert sorted(str(event.machine) for event in events(here, "machine-asked")) == NAMES
        assert said[0] == ("run r1: 4 machines are requested on ec2; they cost $1.2497/h until deepvm run --down r1")
        lost = ec2_server.machines_of(ec2, "r1")["worker/1"]["InstanceId"]
        ec2_server.preempt(lost)
        eventually(lambda: "worker/1" not in up(here), "the loss")
        ec2_server.maintain_all()
        eventually(lambda: "worker/1" in up(here), "its replacement")
        assert [event.data["why"] for event in events(here, "machine-down")] == ["preempted"]
        assert "worker/1 is down (preempted)" in said
        assert deepvm_command(["run", "--down", "r1"]) == 0  # while it is followed: nothing is brought back
    assert ec2_server.remains() == []
    assert "run r1 is ended: nothing of it is left in the cloud" in capsys.readouterr().err
    assert up(here) == {}
    assert [event.data["outcome"] for event in events(here, "run-ended")] == ["interrupted"]
    assert deepvm_command(["run", "--down", "r1", "--json"]) == 0  # again: nothing to do
    assert json.loads(capsys.readouterr().out) == {"run": "r1", "outcome": "ended"}
    assert len(events(here, "run-ended")) == 1
    assert deepvm_command(["run", "--report", "r1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "r1"


def test_what_marks_a_run_as_ending_is_its_owners_alone(sky: Sky, here: Path) -> None:
    with started("skypilot", list(SKY), here):
        cloud_run.end("r1")
    assert stat.S_IMODE((here / "runs" / "r1" / "ending").stat().st_mode) == 0o600


def test_ctrl_c_leaves_the_machines_and_says_how_to_end_them(
    ec2: ec2_server.Relay, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "from deepvm.cli import main; main()", *words("ec2", on_moto(ec2))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        eventually(lambda: process.poll() is not None or len(ec2.asked("CreateFleet")) == 2, "the fleets")
        eventually(lambda: process.poll() is not None or len(events(here, "machine-asked")) == 4, "all are asked")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(10)
    assert (process.returncode, out) == (130, "")
    assert "the run continues in the cloud and costs money: end it with deepvm run --down r1\n" in err
    assert "Traceback" not in err
    assert sum(left.startswith("instance") for left in ec2_server.remains()) == 4
    assert deepvm_command(["run", "--down", "r1"]) == 0
    assert ec2_server.remains() == []


def test_an_unknown_run_or_one_that_runs_on_this_machine_is_not_ended(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deepvm_command(["run", "--down", "r7"]) == 2
    assert "no run is called 'r7'" in capsys.readouterr().err
    folder = here / "runs" / "r1"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"format": "deepvm-run/1", "on": "local"}))
    with (folder / "ledger.sqlite.lock").open("w") as lock:
        (folder / "ledger.sqlite").touch()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert deepvm_command(["run", "--down", "r1"]) == 2
        assert "run r1 is running on this machine" in capsys.readouterr().err
    assert deepvm_command(["run", "--down", "r1"]) == 0
    assert "nothing is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("InvalidParameterValue", "AWS refused to create fleet in us-east-1 (InvalidParameterValue)"),
        ("InsufficientInstanceCapacity", "nothing else fits the budget, and the run needs this machine for its hub"),
    ],
)
def test_a_start_that_fails_leaves_nothing_and_its_name_is_free(
    ec2: ec2_server.Relay, here: Path, capsys: pytest.CaptureFixture[str], code: str, told: str
) -> None:
    ec2.refuse += [("CreateFleet", code)] * 100  # whatever the type
    assert deepvm_command(words("ec2", on_moto(ec2))) == 1
    assert told in capsys.readouterr().err
    assert (ec2_server.remains(), runs(here)) == ([], [])


def test_a_run_of_another_process_is_not_ended_by_a_start_under_its_name(
    ec2: ec2_server.Relay, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with started("ec2", on_moto(ec2), here):
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("DEEPVM_RUNS", str(here / "elsewhere"))
            assert deepvm_command(words("ec2", on_moto(ec2))) == 2
        assert "has 4 machines in us-east-1 from before" in capsys.readouterr().err
        assert len(ec2_server.machines_of(ec2, "r1")) == 4
        cloud_run.end("r1")


# --- when the market has none -------------------------------------------------------------------------------------


def test_a_fleet_that_finds_none_is_replanned_with_another_type(ec2: ec2_server.Relay, here: Path) -> None:
    with started("ec2", on_moto(ec2), here) as said:
        trouble = {"EventSubType": "launchSpecTemporarilyBlacklisted", "EventDescription": "no capacity"}
        ec2.history.append({"EventInformation": trouble, "Timestamp": "2026-11-16T00:00:00Z"})
        ec2_server.preempt(ec2_server.machines_of(ec2, "r1")["worker/1"]["InstanceId"])
        eventually(lambda: up(here).get("worker/1", "g4dn.xlarge") != "g4dn.xlarge", "another type")
        (replanned,) = events(here, "replanned")
        first, second, third = replanned.data["changes"]
        assert replanned.machine == "worker/1"
        assert first.startswith("worker/1 is g4dn.2xlarge (spot, $0.4022/h) instead of g4dn.xlarge ($0.3599/h): ")
        assert second == "the cluster costs $1.2920/h instead of $1.2497/h, of a budget of $1.3000/h"
        assert third == "it is next in the plan's failover list"
        assert f"{first}; {second}; {third}" in said
        types = {name: row["InstanceType"] for name, row in ec2_server.machines_of(ec2, "r1").items()}
        assert types == up(here)
        assert sorted(types.values()) == ["c5.xlarge", "g4dn.2xlarge", "g4dn.xlarge", "g4dn.xlarge"]
        cloud_run.end("r1")
    assert ec2_server.remains() == []


def test_a_place_to_meet_that_is_not_to_be_had_is_replanned_first(ec2: ec2_server.Relay, here: Path) -> None:
    ec2.refuse.append(("CreateFleet", "InsufficientInstanceCapacity"))
    with started("ec2", on_moto(ec2), here):
        assert [event.machine for event in events(here, "replanned")] == ["memory/0"]
        assert up(here)["memory/0"] == ec2_server.machines_of(ec2, "r1")["memory/0"]["InstanceType"] != "c5.xlarge"
        cloud_run.end("r1")
    assert ec2_server.remains() == []


def test_a_start_without_capacity_is_replanned_too(ec2: ec2_server.Relay, here: Path) -> None:
    asked: list[None] = []

    def refuse_the_second() -> None:
        asked.append(None)
        if len(asked) == 1:
            ec2.refuse.append(("CreateFleet", "MaxSpotInstanceCountExceeded"))

    ec2.first["CreateFleet"] = refuse_the_second
    with started("ec2", on_moto(ec2), here):
        assert [event.machine for event in events(here, "replanned")] == ["worker/0"]
        assert up(here) == {
            "memory/0": "c5.xlarge", "worker/0": "g4dn.2xlarge", "worker/1": "g4dn.xlarge", "worker/2": "g4dn.xlarge",
        }  # fmt: skip
        cloud_run.end("r1")
    assert ec2_server.remains() == []


def test_skypilots_machines_are_replaced_from_here_and_waited_for_where_there_are_none(
    sky: Sky, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started("skypilot", list(SKY), here) as said:
        sky.sold_out.add("deepvm-r1-worker-1")
        del sky.alive["deepvm-r1-worker-1"]
        eventually(
            lambda: any("so it is requested again later" in text for text in said),
            "a wait",
        )
        assert {event.machine for event in events(here, "replanned")} == {"worker/1"}
        launches = len(sky.of("launch"))
        eventually(lambda: len(sky.of("launch")) > launches, "another attempt")
        sky.sold_out.clear()
        eventually(lambda: "worker/1" in up(here), "its replacement")
        cloud_run.end("r1")
    assert sky.alive == {}
    assert up(here) == {}
    capsys.readouterr()
    assert deepvm_command(["run", "--report", "r1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "interrupted"


def test_a_lost_hub_ends_the_following_with_what_to_do(sky: Sky, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def show(text: str) -> None:
        said.append(text)
        if sum(" is up" in each for each in said) == 4:
            sky.alive.pop("deepvm-r1-memory-0", None)

    with pytest.raises(DeepvmError, match=r"memory/0 is down, .* deepvm run --down r1$"):
        cloud_run.run_cloud(
            "skypilot", load_cluster("plan.json", rank=RANK), RunSpec(script="train.py", rank=RANK), "r1",
            options=SKY, dry_run=False, show=show,
        )  # fmt: skip
    assert said[-1] == "memory/0 is down (lost)"
    cloud_run.end("r1")
    assert sky.alive == {}


@pytest.mark.parametrize(("fallback", "notes"), [(LAST_MOMENT, 1), ("none", 0)])
def test_a_cloud_says_that_it_does_not_keep_the_plans_deadline(
    fallback: Fallback, notes: int, sky: Sky, here: Path
) -> None:
    said: list[str] = []
    planned = replace(load_cluster("plan.json", rank=RANK), conduct=Conduct(fallback=fallback))
    settings = RunSpec(script="train.py", rank=RANK)
    cloud_run.run_cloud("skypilot", planned, settings, "r1", options=SKY, dry_run=True, show=said.append)
    assert sum("on this machine only" in text for text in said) == notes


def test_a_module_is_not_run_on_machines_of_a_cloud(here: Path) -> None:
    with pytest.raises(DeepvmError) as caught:
        cloud_run.run_cloud(
            "ec2", load_cluster("plan.json", rank=RANK), RunSpec(script="json.tool", module=True), "r1",
            options=(), dry_run=True, show=print,
        )  # fmt: skip
    assert str(caught.value) == "-m json.tool: machines of a cloud get a script, not a module; write -- train.py"
    assert not (here / "runs").exists()
