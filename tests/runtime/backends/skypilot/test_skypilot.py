"""SkyPilot's task files, and the machines that are brought up with them.

SkyPilot itself is large and no part of the project's environment. Its own parser and server take part where
DEEPVM_SKY_PYTHON names an interpreter that has it (`pip install skypilot` beside deepvm's dependencies).
"""

import inspect
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import deepvm
from deepvm.errors import MissingExtra, SourceFailed, UnknownName, UsageError
from deepvm.runtime.backends.base import NoCapacity
from deepvm.runtime.backends.skypilot.backend import SkyPilotBackend, SkyPilotSettings, task_files
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.run_spec import RunSpec
from tests.support.runtime.sky_stand_in import Sky

TOKEN = "a-token-nobody-may-see"
NASTY = (
    "plain", "", "two words", 'a "quoted" one', "it's", "line\nbreak", "\ttab\r", "$HOME `id` $(id) ${x:?}", "a\\b\\n",
    "grüße 😀 \u2028", "key: value", "- item", "#comment", "{a: [b]}", "%s&*!|>'@`", "--", "yes", "null", " lead",
)  # fmt: skip


def machine(name, instance="g4dn.xlarge", market="spot", zone="us-east-1a", region="us-east-1"):
    role = name.split("/")[0]
    prices = {"usd_per_hour": 0.16, "on_demand_usd_per_hour": 0.53}
    return Machine(name=name, role=role, instance=instance, market=market, region=region, zone=zone, **prices)


def cluster_with(*machines):
    return Cluster(machines=machines, architecture="tiering", catalog="x", checkpoint_bytes=None, restore_s=None)


ANCHOR = machine("anchor/0", market="on-demand")
MEMORY = [machine(f"memory/{number}", instance="r5.large", market="on-demand") for number in range(2)]
WORKERS = [machine(f"worker/{number}") for number in range(3)]
TIERED = cluster_with(*WORKERS, *MEMORY)
ANCHORED = cluster_with(ANCHOR, *WORKERS)


@pytest.fixture
def job(tmp_path):
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text("print('trained')\n")
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    return RunSpec(
        run="r1", script=str(script), args=NASTY, folder=tmp_path / "run", hub="0.0.0.0:7171", token_file=token_file,
        policy="every:10", env={"WANDB_API_KEY": "secret-too", "on": "1"},
    )  # fmt: skip


def parsed(cluster, job, settings=None):
    return {
        name: yaml.safe_load(text) for name, text in task_files(cluster, job, settings or SkyPilotSettings()).items()
    }


# --- the files


def test_an_on_demand_task_and_a_spot_task_are_emitted(job):
    files = parsed(TIERED, job)
    assert list(files) == ["r1-workers.yaml", "r1-memory.yaml"]
    workers, memory = files.values()
    assert workers["num_nodes"] == 3
    assert workers["resources"] == {
        "infra": "aws/us-east-1/us-east-1a",
        "instance_type": "g4dn.xlarge",
        "use_spot": True,
        "disk_size": 100,
        "autostop": {"idle_minutes": 10, "down": True},
        "job_recovery": {"strategy": "FAILOVER", "max_restarts_on_errors": 3},
    }
    assert (memory["num_nodes"], memory["resources"]["use_spot"]) == (2, False)
    assert "job_recovery" not in memory["resources"]
    assert "ports" not in memory["resources"]  # the hub is for the machines of this user alone


def test_a_plan_over_clouds_names_the_cloud_and_the_gpus_of_its_hosts(job):
    here = {"zone": "us-central1-a", "region": "us-central1"}
    machines = [
        machine("worker/0", instance="n1-standard-8+T4:1", **here),
        machine("memory/0", instance="e2-standard-4", market="on-demand", **here),
    ]
    workers, memory = parsed(cluster_with(*(replace(m, cloud="gcp") for m in machines)), job).values()
    assert workers["resources"]["infra"] == memory["resources"]["infra"] == "gcp/us-central1/us-central1-a"
    assert (workers["resources"]["instance_type"], workers["resources"]["accelerators"]) == ("n1-standard-8", "T4:1")
    assert "accelerators" not in memory["resources"]
    assert workers["run"].rstrip().endswith("--notices gcp")


def test_the_hub_runs_beside_the_anchor_and_nowhere_else(job):
    files = parsed(ANCHORED, job)
    assert list(files) == ["r1-anchor.yaml", "r1-workers.yaml"]
    assert "deepvm.runtime.hub" in files["r1-anchor.yaml"]["run"]
    assert "deepvm.runtime.hub" not in files["r1-workers.yaml"]["run"]
    assert "DEEPVM_JOB" not in files["r1-workers.yaml"]["envs"]
    assert files["r1-workers.yaml"]["run"].rstrip().endswith("--notices aws")


def test_several_kinds_of_workers_have_a_file_each(job):
    other = machine("worker/3", instance="g5.xlarge")
    files = parsed(cluster_with(ANCHOR, *WORKERS, other), job)
    assert list(files) == ["r1-anchor.yaml", "r1-workers-0.yaml", "r1-workers-3.yaml"]
    assert files["r1-workers-3.yaml"]["envs"]["DEEPVM_FIRST"] == "3"


def test_no_secret_is_in_any_file(job):
    for text in task_files(ANCHORED, job, SkyPilotSettings()).values():
        assert TOKEN not in text
        assert "secret-too" not in text
        assert yaml.safe_load(text)["secrets"] == {"DEEPVM_TOKEN": "", "WANDB_API_KEY": "", "on": ""}


def test_torch_is_installed_before_deepvm(job):
    packages = ("torch==2.13.0", "./it's a wheel.whl")
    lines = parsed(ANCHORED, job, SkyPilotSettings(packages=packages))["r1-workers.yaml"]["setup"].splitlines()
    assert [shlex.split(line)[-1] for line in lines if "pip install" in line] == list(packages)


def test_a_folder_with_any_name_is_sent(job, tmp_path):
    folder = tmp_path / 'ü: "a"\n#😀'
    folder.mkdir()
    task = parsed(ANCHORED, replace(job, script=str(folder / "sub" / "x.py")), SkyPilotSettings(workdir=folder))
    assert task["r1-anchor.yaml"]["workdir"] == str(folder)
    assert json.loads(task["r1-anchor.yaml"]["envs"]["DEEPVM_JOB"])["script"] == "sub/x.py"


@pytest.mark.parametrize(
    ("cluster", "changes", "settings", "told"),
    [
        (cluster_with(*WORKERS), {}, {}, "the hub needs an on-demand one"),
        (cluster_with(replace(ANCHOR, region=None)), {}, {}, "names no region for anchor/0"),
        (ANCHORED, {"run": "a b"}, {}, "'a b' is not a valid run name on SkyPilot"),
        (ANCHORED, {"hub": "nowhere"}, {}, "HOST:PORT"),
        (ANCHORED, {"env": {"A=B": "c"}}, {}, "not a valid name of an environment variable"),
        (ANCHORED, {"env": {"DEEPVM_TOKEN": "c"}}, {}, "leave it out"),
        (ANCHORED, {}, {"workdir": Path("/nonexistent")}, "is not in /nonexistent"),
    ],
)
def test_what_cannot_be_emitted_is_reported(job, cluster, changes, settings, told):
    with pytest.raises(UsageError, match=told):
        task_files(cluster, replace(job, **changes), SkyPilotSettings(**settings))


# --- what the files do on a machine: bash runs them here, with a python that writes down how it was called


def run_on_a_machine(text, home, rank, **variables):
    python = home / ".deepvm" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    calls = home / "calls"
    calls.mkdir(exist_ok=True)
    hub = str(calls / "deepvm.runtime.hub")
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        f"path = {str(calls)!r} + '/' + sys.argv[2]\n"
        "json.dump([sys.argv[3:], os.environ.get('DEEPVM_TOKEN')], open(path + '.part', 'w'))\n"
        "os.rename(path + '.part', path)\n"
        "time.sleep(60 if sys.argv[2].endswith('hub') else 0)\n"
        f"while {'runtime.hub' in text} and not os.path.exists({hub!r}): time.sleep(0.01)\n"
    )
    python.chmod(0o755)
    rank_variables = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **rank_variables, **variables}
    ended = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60)
    return ended, {path.name: json.loads(path.read_text()) for path in calls.iterdir()}


def test_the_hub_gets_every_argument_as_it_was_and_dies_with_its_machine(job, tmp_path):
    task = parsed(TIERED, job)["r1-memory.yaml"]
    ended, calls = run_on_a_machine(task["run"], tmp_path, 0, **(task["envs"] | {"DEEPVM_TOKEN": TOKEN}))
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / ".deepvm" / "runs" / "r1"
    assert json.loads((folder / "job.json").read_text())["args"] == list(NASTY)
    assert (folder / "token").read_text().strip() == TOKEN
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    token = ["--token-file", f"{folder}/token", "--folder", str(folder)]
    listen = ["--listen", "10.0.0.4:7171", "--job", f"{folder}/job.json"]
    named = ["--hub", "10.0.0.4:7171", "--name", "memory/0"]
    assert calls == {
        "deepvm.runtime.hub": [[*listen, *token], None],
        "deepvm.runtime.agent": [[*named, *token, "--address", "10.0.0.4", "--notices", "none"], None],
    }


def test_a_second_memory_node_joins_the_first_ones_hub(job, tmp_path):
    task = parsed(TIERED, job)["r1-memory.yaml"]
    text = task["run"].replace("runtime.hub", "runtime.never")
    ended, calls = run_on_a_machine(text, tmp_path, 1, **(task["envs"] | {"DEEPVM_TOKEN": TOKEN}))
    assert ended.returncode == 0, ended.stderr
    assert calls["deepvm.runtime.agent"][0][:4] == ["--hub", "10.0.0.4:7171", "--name", "memory/1"]


def test_a_worker_without_a_token_or_a_hub_says_what_is_missing(job, tmp_path):
    task = parsed(TIERED, job)["r1-workers.yaml"]
    ended, calls = run_on_a_machine(task["run"], tmp_path, 0, **task["envs"])
    assert (ended.returncode != 0, calls) == (True, {})
    assert "DEEPVM_TOKEN: is empty, give it with --secret DEEPVM_TOKEN" in ended.stderr
    ended, calls = run_on_a_machine(task["run"], tmp_path, 0, **(task["envs"] | {"DEEPVM_TOKEN": TOKEN}))
    assert (ended.returncode != 0, calls) == (True, {})
    assert "give it with --env DEEPVM_HUB=HOST:7171" in ended.stderr


# --- machines: SkyPilot's side played by a server in memory; that it is called as the real one wants is checked below


@pytest.fixture
def sky(monkeypatch):
    found = Sky()
    monkeypatch.setitem(sys.modules, "sky", found)
    return found


QUICK = SkyPilotSettings(ask_every_s=1e-9, down_within_s=0.2)


def seen(backend):
    return [(change.machine, change.state, change.why, change.address) for change in backend.poll()]


def all_up(backend, sky):
    backend.up(ANCHORED.machines)
    sky.arrive("deepvm-r1-anchor-0", "10.0.0.9")
    backend.poll()
    for number in range(3):
        sky.arrive(f"deepvm-r1-worker-{number}", f"10.0.0.{number}")
    assert [change.machine for change in backend.poll()] == ["worker/0", "worker/1", "worker/2"]


def test_the_workers_are_launched_when_the_hubs_address_is_known(sky, job, capsys):
    backend = SkyPilotBackend(job, ANCHORED, QUICK)
    backend.up([*WORKERS, ANCHOR])
    assert seen(backend) == []
    assert (sky.of("launch"), backend.hub) == (["deepvm-r1-anchor-0"], None)
    sky.arrive("deepvm-r1-anchor-0", "10.0.0.9")
    assert seen(backend) == [("anchor/0", "up", "", "10.0.0.9")]
    assert backend.hub == "10.0.0.9:7171"
    assert sky.of("launch")[1:] == [f"deepvm-r1-worker-{number}" for number in range(3)]
    task = sky.tasks["deepvm-r1-worker-2"]
    assert (task.num_nodes, task.envs) == (1, {"DEEPVM_FIRST": "2", "DEEPVM_HUB": "10.0.0.9:7171"})
    assert task.secrets == {"DEEPVM_TOKEN": TOKEN, "WANDB_API_KEY": "secret-too", "on": "1"}
    assert TOKEN not in "".join(path.read_text() for path in (job.folder / "skypilot").iterdir())
    assert capsys.readouterr().out == ""


def test_a_preempted_worker_alone_is_taken_down_and_replaced(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, QUICK)
    all_up(backend, sky)
    assert seen(backend) == []
    del sky.alive["deepvm-r1-worker-1"]
    assert [change for _ in range(2) for change in seen(backend)] == [("worker/1", "down", "preempted", None)]
    assert sky.of("down") == ["deepvm-r1-worker-1"]
    backend.up([WORKERS[1]])
    backend.poll()
    assert sky.of("launch")[4:] == ["deepvm-r1-worker-1"]
    sky.arrive("deepvm-r1-worker-1", "10.0.0.77")
    assert seen(backend) == [("worker/1", "up", "", "10.0.0.77")]


def test_a_replacement_waits_until_what_had_its_name_is_gone(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, QUICK)
    all_up(backend, sky)
    sky.alive["deepvm-r1-worker-1"] = "INIT"  # SkyPilot's word for a cluster that is not well
    sky.stuck.add("deepvm-r1-worker-1")
    assert [change for _ in range(3) for change in seen(backend)] == [("worker/1", "down", "preempted", None)]
    backend.up([WORKERS[1]])
    backend.poll()
    assert sky.of("launch").count("deepvm-r1-worker-1") == 1
    sky.requests[sky.open_request("down", "deepvm-r1-worker-1")] = "gone"
    backend.poll()
    assert sky.of("launch").count("deepvm-r1-worker-1") == 2


def test_a_market_that_has_none_says_so_at_the_next_asking(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, QUICK)
    backend.up([ANCHOR, WORKERS[0]])
    sky.arrive("deepvm-r1-anchor-0", "10.0.0.9")
    backend.poll()
    sky.arrive(
        "deepvm-r1-worker-0", sky.exceptions.ResourcesUnavailableError("\x1b[33mno spot\x1b[0m in us-east-1a\nmore")
    )
    assert seen(backend) == [("worker/0", "down", "lost", None)]
    with pytest.raises(NoCapacity, match=r"no spot capacity for g4dn\.xlarge \(worker/0\): no spot in us-east-1a"):
        backend.up([WORKERS[0]])
    backend.up([WORKERS[0]])
    backend.poll()
    assert sky.of("launch").count("deepvm-r1-worker-0") == 2


def test_a_launch_that_fails_is_a_machine_that_is_down_and_says_why_when_it_is_requested_again(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, QUICK)
    backend.up([ANCHOR])
    sky.arrive("deepvm-r1-anchor-0", RuntimeError("no such image"))
    assert seen(backend) == [("anchor/0", "down", "failed", None)]
    with pytest.raises(SourceFailed, match="no such image"):
        backend.up([ANCHOR])


def test_if_several_are_refused_the_machine_with_the_hub_is_told_first(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, replace(QUICK, launch_within_s=1e-9))
    backend.up([ANCHOR])
    assert seen(backend) == [("anchor/0", "down", "failed", None)]
    with pytest.raises(NoCapacity, match="anchor/0"):
        backend.up([*WORKERS, ANCHOR])
    backend.up(WORKERS)  # of none of them was anything kept


def test_a_launch_that_never_ends_is_given_up(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, replace(QUICK, launch_within_s=1e-9))
    backend.up([ANCHOR])
    assert seen(backend) == [("anchor/0", "down", "failed", None)]
    assert (sky.of("api_cancel"), sky.of("down")) == (["q0"], ["deepvm-r1-anchor-0"])


def test_one_answer_that_fails_ends_no_run_but_five_do(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, QUICK)
    all_up(backend, sky)

    def api_status(request_ids=None):
        raise ConnectionError("the server is gone")

    sky.api_status = api_status
    for _ in range(4):
        assert seen(backend) == []
    with pytest.raises(SourceFailed, match=r"SkyPilot failed \(api_status\): the server is gone"):
        backend.poll()


def test_down_ends_everything_and_tells_what_it_could_not_end(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, QUICK)
    all_up(backend, sky)
    with pytest.raises(UsageError, match="worker/0 is up or requested already"):
        backend.up([WORKERS[0]])
    with pytest.raises(UnknownName, match="worker/7"):
        backend.down(["worker/7"])
    with pytest.raises(UsageError, match="cannot be preempted"):
        backend.preempt("worker/0", notice_s=1)
    backend.down(["worker/0"], within_s=0.1)
    assert seen(backend) == [("worker/0", "down", "stopped", None)]
    sky.stuck.add("deepvm-r1-worker-2")
    with pytest.raises(SourceFailed, match=r"end with sky down deepvm-r1-worker-2$"):
        backend.down(within_s=0.1)
    assert sky.alive == {"deepvm-r1-worker-2": "UP"}
    assert seen(backend) == [(name, "down", "stopped", None) for name in ("anchor/0", "worker/1")]
    sky.stuck.clear()
    SkyPilotBackend(job, ANCHORED, QUICK).down()  # another process, later: by their names
    assert sky.alive == {}


def test_while_a_teardown_is_awaited_the_server_is_asked_now_and_then(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, QUICK)
    all_up(backend, sky)
    asked, answer = [], sky.api_status

    def api_status(request_ids=None):
        asked.append(request_ids)
        return answer(request_ids)

    sky.api_status = api_status
    sky.stuck.add("deepvm-r1-worker-2")
    with pytest.raises(SourceFailed, match="deepvm-r1-worker-2"):
        backend.down(["worker/2"], within_s=0.0)
    assert len(asked) <= 4  # half a second apart, or as long as is left


def test_a_server_that_fails_for_one_machine_does_not_keep_the_others(sky, job):
    backend = SkyPilotBackend(job, ANCHORED, QUICK)
    all_up(backend, sky)
    real = sky.down

    def cancel(cluster_name, all=False):
        raise ConnectionError("no answer")

    def down(cluster_name):
        if cluster_name == "deepvm-r1-anchor-0":
            raise ConnectionError("no answer")
        return real(cluster_name)

    sky.cancel, sky.down = cancel, down
    with pytest.raises(
        SourceFailed, match=r"anchor/0: SkyPilot failed \(down\): no answer.* sky down deepvm-r1-anchor-0$"
    ):
        backend.down(within_s=0.1)
    assert list(sky.alive) == ["deepvm-r1-anchor-0"]


def test_a_missing_skypilot_says_what_to_install(monkeypatch, job):
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(MissingExtra, match=r"deepvm run --on skypilot needs .* pip install 'deepvm\[skypilot\]'"):
        SkyPilotBackend(job, ANCHORED)
    assert task_files(ANCHORED, job, SkyPilotSettings())


def test_a_skypilot_without_secrets_is_too_old(sky, job):
    sky.__version__ = "0.9.3"
    del sky.Task.update_secrets
    with pytest.raises(UsageError, match=r"SkyPilot 0\.9\.3 writes secrets into files"):
        SkyPilotBackend(job, ANCHORED)


# --- SkyPilot itself


@pytest.fixture
def skypilot(tmp_path):
    """Runs a program with SkyPilot in a home of its own, with a price list of two types in one zone."""
    python = os.environ.get("DEEPVM_SKY_PYTHON")
    if not python:
        pytest.skip("DEEPVM_SKY_PYTHON names no interpreter with SkyPilot: its own parser was not asked")
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(Path(deepvm.__file__).parents[1]),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "SKYPILOT_API_SERVER_LOCAL_PORT": "46817",
    }  # fmt: skip
    prelude = """
        import json, sys
        from pathlib import Path
        import sky
        from sky.catalog import common
        prices = Path(common.get_catalog_path("aws/vms.csv"))
        prices.parent.mkdir(parents=True, exist_ok=True)
        prices.write_text(
            "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone\\n"
            "g4dn.xlarge,T4,1,4,16,,0.526,0.1578,us-east-1,us-east-1a\\nr5.large,,,2,16,,0.126,0.03,us-east-1,us-east-1a\\n"
        )
    """

    def run(program, *arguments, within_s=100):
        command = [python, "-c", textwrap.dedent(prelude) + textwrap.dedent(program), *map(str, arguments)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=within_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        assert process.returncode == 0, err[-3000:]
        return json.loads(out.splitlines()[-1])

    return run


def test_skypilots_own_parser_takes_every_file(skypilot, job, tmp_path):
    mixed = cluster_with(ANCHOR, *WORKERS, machine("worker/3", instance="r5.large", market="on-demand"))
    paths = []
    for number, cluster in enumerate([TIERED, ANCHORED, mixed]):
        for name, text in task_files(cluster, job, SkyPilotSettings()).items():
            paths.append(tmp_path / f"{number}-{name}")
            paths[-1].write_text(text)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(paths[0].read_text().replace("us-east-1a", "us-east-1z"))
    program = """
        from sky.skylet import log_lib
        found = {}
        for path in sys.argv[2:]:
            task = sky.Task.from_yaml(path)
            task.update_envs({"DEEPVM_HUB": "10.0.0.9:7171"})
            task.update_secrets({"DEEPVM_TOKEN": "t0ken"})
            task.validate()
            (resources,) = task.resources
            found[Path(path).name] = {
                "spot": resources.use_spot, "type": resources.instance_type, "zone": resources.zone,
                "cloud": str(resources.cloud), "nodes": task.num_nodes,
                "envs": task.envs, "secrets": list(task.secrets),
                "workdir": task.workdir, "down": resources.autostop_config.down, "recovery": resources.job_recovery,
                "printed": "t0ken" in repr(task), "script": log_lib.make_task_bash_script(task.run, task.envs),
            }
        try:
            sky.Task.from_yaml(sys.argv[1]).validate()
            found["wrong"] = "taken"
        except ValueError as error:
            found["wrong"] = str(error)
        print()
        print(json.dumps(found))
    """
    found = skypilot(program, wrong, *paths)
    assert "us-east-1z" in found.pop("wrong")  # a zone that is not on the list is refused: the others were looked up
    assert [(one["type"], one["spot"], one["nodes"]) for one in found.values()] == [
        ("g4dn.xlarge", True, 3), ("r5.large", False, 2), ("g4dn.xlarge", False, 1), ("g4dn.xlarge", True, 3),
        ("g4dn.xlarge", False, 1), ("g4dn.xlarge", True, 3), ("r5.large", False, 1),
    ]  # fmt: skip
    for one in found.values():
        assert (one["cloud"], one["zone"], one["down"], one["printed"]) == ("AWS", "us-east-1a", True, False)
        assert (one["workdir"], one["envs"]["DEEPVM_HUB"]) == (str(tmp_path / "code"), "10.0.0.9:7171")
        assert one["secrets"] == ["DEEPVM_TOKEN", "WANDB_API_KEY", "on"]
        assert bool(one["recovery"]) is one["spot"]
    memory = found["0-r1-memory.yaml"]
    assert json.loads(memory["envs"]["DEEPVM_JOB"])["args"] == list(NASTY)
    (tmp_path / "home" / "sky_workdir").mkdir()
    ended, _ = run_on_a_machine(memory["script"], tmp_path / "home", 0, DEEPVM_TOKEN=TOKEN)  # as SkyPilot wraps it
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "home/.deepvm/runs/r1/job.json").read_text())["args"] == list(NASTY)


def test_the_server_in_memory_is_called_as_the_real_one_wants(skypilot):
    names = ["launch", "status", "down", "cancel", "api_cancel", "api_status", "get"]
    program = """
        import inspect
        print(json.dumps({name: list(inspect.signature(getattr(sky, name)).parameters) for name in sys.argv[1:]}))
    """
    for name, real in skypilot(program, *names).items():
        ours = list(inspect.signature(getattr(Sky, name)).parameters)[1:]
        assert (ours[0], set(ours) - set(real)) == (real[0], set()), name


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_real_server_without_a_cloud_refuses_the_launch_and_has_nothing_left(skypilot, job):
    program = """
        import time
        from deepvm.errors import DeepvmError
        from deepvm.runtime.run_spec import RunSpec
        from deepvm.runtime.cluster import Cluster, Machine
        from deepvm.runtime.backends.skypilot.backend import SkyPilotBackend, SkyPilotSettings
        script, folder, token = map(Path, sys.argv[1:])
        anchor = Machine(
            name="anchor/0", role="anchor", instance="r5.large", market="on-demand", usd_per_hour=1.0,
            on_demand_usd_per_hour=1.0, region="us-east-1", zone="us-east-1a",
        )
        cluster = Cluster(machines=(anchor,), architecture="x", catalog="x", checkpoint_bytes=None, restore_s=None)
        places = {"script": str(script), "folder": folder, "token_file": token, "hub": "0.0.0.0:7171"}
        job = RunSpec(run="r1", args=(), policy="x", **places)
        try:
            backend = SkyPilotBackend(job, cluster, SkyPilotSettings(ask_every_s=0.5))
            backend.up([anchor])
            changes, deadline_s = [], time.monotonic() + 200
            while not changes and time.monotonic() < deadline_s:
                changes = backend.poll()
                time.sleep(0.2)
            try:
                backend.up([anchor])
                told = "nothing"
            except DeepvmError as error:
                told = str(error)
            backend.down(within_s=1)
        finally:
            sky.api_stop()
        print()
        print(json.dumps([[(one.machine, one.state, one.why) for one in changes], told]))
    """
    changes, told = skypilot(program, job.script, job.folder, job.token_file, within_s=280)
    assert changes == [["anchor/0", "down", "failed"]]
    assert "Cloud access is not set up. Run: sky check" in told
