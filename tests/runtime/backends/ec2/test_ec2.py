"""A run on EC2: real calls of boto3 to a moto server on loopback. No machine starts there."""

import base64
import gzip
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from deepvm.errors import Infeasible, MissingExtra, SourceFailed, UnknownName, UsageError
from deepvm.runtime.backends.base import NoCapacity
from deepvm.runtime.backends.ec2 import backend as ec2_module
from deepvm.runtime.backends.ec2 import calls, cleanup
from deepvm.runtime.backends.ec2.backend import Ec2Backend, Ec2Settings
from deepvm.runtime.backends.ec2.requests import Ec2Group
from deepvm.runtime.backends.ec2.user_data import user_data
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.run_spec import RunSpec

boto3 = pytest.importorskip("boto3")
from tests.support.runtime import ec2_server  # noqa: E402
from tests.support.runtime.ec2_server import IMAGE, everything  # noqa: E402

TOKEN, SECRET = "8Zt-the-token-of-this-run-Qx", "an-api-key-of-the-user"
RUN, REGION, ZONE = "digits-1", "us-east-1", "us-east-1c"


@pytest.fixture(scope="module")
def server():
    with ec2_server.account() as relay:
        yield relay


@pytest.fixture
def ec2(server):
    server.reset()
    return server


@pytest.fixture
def job(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "train.py").write_text("print('trains')\n")
    return RunSpec(
        run=RUN, script=str(tmp_path / "train.py"), args=("--epochs", "3"), folder=tmp_path, hub="127.0.0.1:7069",
        token_file=tmp_path / "token", policy="every:10", env={"API_KEY": SECRET},
    )  # fmt: skip


def machine(name, instance, market="spot", usd=0.2, zone=ZONE):
    role = name.partition("/")[0]
    return Machine(
        name=name, role=role, instance=instance, market=market, usd_per_hour=usd, on_demand_usd_per_hour=0.5,
        region=REGION, zone=zone,
    )  # fmt: skip


def tiering(workers=3, memory=1, **more):
    kept = [machine(f"memory/{i}", "r5.large", "on-demand", 0.126) for i in range(memory)]
    machines = (*(machine(f"worker/{i}", "g4dn.xlarge", **more) for i in range(workers)), *kept)
    return Cluster(
        machines=machines, architecture="tiering", catalog="aws-2026-08", checkpoint_bytes=None, restore_s=None
    )


def settings(ec2, **more):
    return Ec2Settings(**{"image": IMAGE, "endpoint_url": ec2.url, "release_s": 5.0} | more)


def backend(ec2, job, cluster=None, *, dry_run=False, **more):
    return Ec2Backend(job, cluster or tiering(), settings(ec2, **more), dry_run=dry_run)


def started(ec2, job, cluster=None, **more):
    cluster = cluster or tiering()
    made = backend(ec2, job, cluster, **more)
    made.up(cluster.machines)
    return made


def of_run(ec2):
    rows = ec2.client.describe_instances(Filters=[{"Name": "tag:deepvm:run", "Values": [RUN]}])["Reservations"]
    return [i for row in rows for i in row["Instances"]]


def tags(row):
    return {tag["Key"]: tag["Value"] for tag in row["Tags"]}


def user_data_of(ec2, template):
    version = ec2.client.describe_launch_template_versions(LaunchTemplateName=template)["LaunchTemplateVersions"][0]
    return base64.b64decode(version["LaunchTemplateData"]["UserData"]).decode(), version["LaunchTemplateData"]


def packed(text, path):
    """The file that user data write."""
    block = text.split(f"gunzip > {path}\n")[1].split("\nDEEPVM")[0]
    return gzip.decompress(base64.b64decode(block))


# Up ---------------------------------------------------------------------------------------------------------------


def test_up_makes_two_fleets_in_one_zone_and_a_group_that_admits_the_cluster_alone(ec2, job):
    started(ec2, job, max_usd_per_hour=1.0, max_usd=2.0)
    instances = of_run(ec2)
    assert sorted(i["InstanceType"] for i in instances) == ["g4dn.xlarge"] * 3 + ["r5.large"]
    assert {i["Placement"]["AvailabilityZone"] for i in instances} == {ZONE}
    assert {tags(i)["deepvm:role"] for i in instances} == {"worker", "memory"}
    spot, fixed = sorted(ec2.client.describe_fleets()["Fleets"], key=lambda f: f["Type"], reverse=True)
    assert (spot["Type"], spot["TargetCapacitySpecification"]["TotalTargetCapacity"]) == ("maintain", 3)
    assert (fixed["Type"], fixed["TargetCapacitySpecification"]["TotalTargetCapacity"]) == ("instant", 1)
    assert tags(spot)["deepvm:run"] == tags(fixed)["deepvm:run"] == RUN
    (group,) = ec2.client.describe_security_groups(Filters=[{"Name": "tag:deepvm:run", "Values": [RUN]}])[
        "SecurityGroups"
    ]
    (rule,) = group["IpPermissions"]
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [group["GroupId"]]
    assert not rule["IpRanges"]
    assert not rule.get("Ipv6Ranges")
    fixed_request, spot_request = ec2.asked("CreateFleet")
    assert float(fixed_request["OnDemandOptions.MaxTotalPrice"]) == pytest.approx(1.0 - 0.6)
    assert float(spot_request["SpotOptions.MaxTotalPrice"]) == pytest.approx(1.0 - 0.126)
    assert spot_request["TerminateInstancesWithExpiration"] == "true"
    assert spot_request["ValidUntil"]
    assert "SpotOptions.MaintenanceStrategies" not in str(spot_request)  # nothing is replaced before it is lost
    assert len({r["ClientToken"] for r in ec2.asked("CreateFleet")}) == 2


def test_templates_ask_for_metadata_v2_end_with_the_machine_and_lead_to_the_hub(ec2, job):
    started(ec2, job, max_usd=2.0, key_name="mine", instance_profile="s3-writer", volume_gb=100)
    address = next(i["PrivateIpAddress"] for i in of_run(ec2) if i["InstanceType"] == "r5.large")
    for name in ("hub", "worker-g4dn.xlarge-spot"):
        text, data = user_data_of(ec2, f"deepvm-{RUN}-{name}")
        assert data["MetadataOptions"]["HttpTokens"] == "required"
        assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
        assert data["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 100
        assert data["KeyName"] == "mine"
        assert data["SecurityGroupIds"][0].startswith("sg-")
        assert packed(text, "/etc/deepvm/token").decode().strip() == TOKEN
        assert packed(text, "/etc/deepvm/environment").decode() == f'API_KEY="{SECRET}"\n'
        assert packed(text, "/var/lib/deepvm/script/train.py") == b"print('trains')\n"
        assert 'shutdown -h "+' in text
        checked = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, timeout=30, check=False)
        assert checked.returncode == 0, checked.stderr
    assert f"--hub {address}:7069 --name worker/auto" in text
    assert "deepvm.runtime.hub" not in text
    assert "job.json" not in text
    hub, _ = user_data_of(ec2, f"deepvm-{RUN}-hub")
    assert "--hub $address:7069 --name memory/0" in hub
    document = json.loads(packed(hub, "/etc/deepvm/job.json"))
    assert document["script"] == "/var/lib/deepvm/script/train.py"
    assert document["env"] == {}  # the hub sends the document to machines, in plain text
    assert [row["name"] for row in document["machines"]] == ["worker/0", "worker/1", "worker/2", "memory/0"]


@pytest.mark.parametrize("breaks", [False, True])
def test_user_data_install_write_and_start_or_end_the_machine(job, tmp_path, breaks):
    """The script itself, run by bash: with folders of this test, and the system's commands only noted."""
    strange = r"""a b"c\d`e`$(f)'#;"""
    job = replace(job, env={"API_KEY": SECRET, "STRANGE": strange})
    root, commands, noted = tmp_path / "root", tmp_path / "commands", tmp_path / "noted"
    commands.mkdir()
    for folder in ("etc/systemd/system", "var/lib", "opt/deepvm/bin"):
        (root / folder).mkdir(parents=True)
    note = f'#!/bin/bash\necho "$(basename $0) $*" >> {noted}\n'
    for name in ("shutdown", "systemctl", "python3", "curl"):
        (commands / name).write_text(note + ("echo 10.0.0.7\n" if name == "curl" else ""))
    (root / "opt/deepvm/bin/python").write_text(note + ("exit 1\n" if breaks else ""))
    for command in (*commands.iterdir(), root / "opt/deepvm/bin/python"):
        command.chmod(0o755)
    group = Ec2Group(role="memory", instance="r5.large", market="on-demand", hub=True)
    text = user_data(
        job,
        group,
        tiering().machines,
        name="memory/0",
        hub_address=None,
        package="deepvm==1",
        ends_at_s=time.time() + 3630,
    )
    text = re.sub(r"(?<![\w/.])/(etc|var|opt)/", rf"{root}/\1/", text)
    done = subprocess.run(
        ["bash"], input=text, text=True, capture_output=True, timeout=60, check=False,
        env={"PATH": f"{commands}:{os.environ['PATH']}"},
    )  # fmt: skip
    lines = noted.read_text().splitlines()
    assert lines[0] == "shutdown -h +60 the spending cap of this run is reached"
    assert (root / "etc/deepvm/token").read_text() == TOKEN + "\n"
    assert {path.stat().st_mode & 0o077 for path in (root / "etc/deepvm").iterdir()} == {0}
    assert TOKEN not in noted.read_text() + done.stdout + done.stderr
    assert SECRET not in noted.read_text() + done.stdout + done.stderr
    found = subprocess.run(  # bash reads double quotes as systemd does
        ["bash", "-c", '. "$1"; printf "%s\\n%s\\n" "$API_KEY" "$STRANGE"', "-", root / "etc/deepvm/environment"],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert found.stdout.splitlines() == [SECRET, strange]
    if breaks:
        assert lines[-1] == "shutdown -h +1"
        assert "of the user data failed, this machine ends" in done.stdout
        return
    assert done.returncode == 0, done.stderr
    assert lines[-1] == "systemctl start deepvm-hub deepvm-machine"
    assert [line for line in lines if "pip install" in line] == [
        "python -m pip install --quiet --index-url https://download.pytorch.org/whl/cpu torch>=2.4,<3",
        "python -m pip install --quiet deepvm==1",
    ]
    hub, joined = ((root / f"etc/systemd/system/deepvm-{n}.service").read_text() for n in ("hub", "machine"))
    assert "-m deepvm.runtime.hub --listen 10.0.0.7:7069 --job" in hub
    assert "-m deepvm.runtime.agent --hub 10.0.0.7:7069 --name memory/0 --token-file" in joined
    assert all(f"EnvironmentFile={root}/etc/deepvm/environment\n" in unit for unit in (hub, joined))


@pytest.mark.parametrize("env", [{"A=B": "c"}, {"DEEPVM_RUN_KEY": "two\nlines"}])
def test_an_environment_that_cannot_be_passed_on_is_refused_without_its_value(ec2, job, env):
    with pytest.raises(UsageError, match=r"A=B|DEEPVM_RUN_KEY") as refused:
        started(ec2, replace(job, env=env))
    assert "two" not in str(refused.value)


def test_machines_get_names_in_tags_and_are_reported_once(ec2, job):
    made = started(ec2, job)
    changes = made.poll()
    assert sorted((c.machine, c.state) for c in changes) == [
        ("memory/0", "up"), ("worker/0", "up"), ("worker/1", "up"), ("worker/2", "up"),
    ]  # fmt: skip
    addresses = {tags(i)["deepvm:machine"]: i["PrivateIpAddress"] for i in of_run(ec2)}
    assert {c.machine: c.address for c in changes} == addresses
    assert made.poll() == []
    with pytest.raises(UsageError, match="worker/1 is up or requested already"):
        made.up([machine("worker/1", "g4dn.xlarge")])


def test_without_a_zone_the_cheapest_is_taken(ec2, job):
    cluster = tiering(zone=None)
    cluster = replace(cluster, machines=tuple(replace(m, zone=None) for m in cluster.machines))
    started(ec2, job, cluster)
    (asked,) = ec2.asked("DescribeSpotPriceHistory")
    assert asked["InstanceType.1"] == "g4dn.xlarge"
    assert {i["Placement"]["AvailabilityZone"] for i in of_run(ec2)} == {"us-east-1a"}  # moto's prices are all one


def test_an_image_comes_from_a_parameter(ec2, job):
    ssm = boto3.Session().client("ssm", region_name=REGION, endpoint_url=ec2.url)
    ssm.put_parameter(Name="/images/mine", Value=IMAGE, Type="String")
    started(ec2, job, image="/images/mine")
    assert {i["ImageId"] for i in of_run(ec2)} == {IMAGE}
    Ec2Backend.find(RUN, REGION, settings=settings(ec2)).down()
    with pytest.raises(SourceFailed, match="add --set image="):
        started(ec2, job, image="/images/none")


# Refusals ---------------------------------------------------------------------------------------------------------


def test_caps_refuse_before_any_call(ec2, job):
    with pytest.raises(Infeasible, match=r"cost \$0.7260/h .* cap is \$0.5000/h"):
        started(ec2, job, max_usd_per_hour=0.5)
    with pytest.raises(Infeasible, match="minutes"):
        started(ec2, job, max_usd=0.01)
    assert ec2.requests == []


def test_what_cannot_run_on_ec2_is_refused_before_any_call(ec2, job, tmp_path):
    spot_only = replace(tiering(), machines=tiering(memory=0).machines)
    with pytest.raises(UsageError, match="the hub needs an on-demand one"):
        backend(ec2, job, spot_only)
    with pytest.raises(UsageError, match="memory/0 must be requested first"):
        backend(ec2, job).up([machine("worker/0", "g4dn.xlarge")])
    with pytest.raises(UsageError, match="neither an AMI"):
        settings(ec2, image="ubuntu")
    assert ec2.requests == []


def test_a_script_that_user_data_cannot_hold_is_refused(ec2, job, tmp_path):
    large = tmp_path / "large.py"
    large.write_text("\n".join(os.urandom(40).hex() for _ in range(400)))
    with pytest.raises(UsageError, match="of 16384 that EC2 takes: move code into a package"):
        started(ec2, replace(job, script=str(large)))
    assert not ec2.asked("CreateFleet")


def test_a_run_that_has_machines_already_is_not_started_twice(ec2, job):
    started(ec2, job)
    with pytest.raises(UsageError, match=r"has 4 machines in us-east-1 from before: .* --down digits-1"):
        started(ec2, job)
    assert len(of_run(ec2)) == 4


def test_without_boto3_the_error_names_the_command_that_installs_it(ec2, job, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingExtra, match=r"deepvm\[aws\]"):
        started(ec2, job)


# Losses -----------------------------------------------------------------------------------------------------------


def test_only_what_was_lost_is_replaced_and_by_ec2_itself(ec2, job):
    made = started(ec2, job)
    before = {c.machine: c.address for c in made.poll()}
    lost = next(i["InstanceId"] for i in of_run(ec2) if tags(i)["deepvm:machine"] == "worker/1")
    ec2_server.preempt(lost)
    ec2_server.maintain_all()
    (gone,) = made.poll()  # the loss first, and alone
    assert (gone.machine, gone.state, gone.why) == ("worker/1", "down", "preempted")
    fleets = len(ec2.asked("CreateFleet"))
    made.up([machine("worker/1", "g4dn.xlarge")])
    assert len(ec2.asked("CreateFleet")) == fleets
    assert not ec2.asked("ModifyFleet")
    (back,) = made.poll()
    assert (back.machine, back.state) == ("worker/1", "up")
    assert back.address not in before.values()


def test_a_vanished_machine_is_lost_and_one_that_we_take_is_preempted(ec2, job):
    made = started(ec2, job)
    made.poll()
    names = {tags(i)["deepvm:machine"]: i["InstanceId"] for i in of_run(ec2)}
    ec2.client.terminate_instances(InstanceIds=[names["worker/2"]])
    made.preempt("worker/0", notice_s=120)
    assert {(c.machine, c.why) for c in made.poll()} == {("worker/2", "lost"), ("worker/0", "preempted")}
    with pytest.raises(UsageError, match="memory/0 is on-demand"):
        made.preempt("memory/0", notice_s=120)
    with pytest.raises(UsageError, match="worker/0 is not up"):
        made.preempt("worker/0", notice_s=120)
    with pytest.raises(UnknownName):
        made.preempt("worker/9", notice_s=120)


def test_a_lost_memory_node_is_started_again_when_it_is_asked_for(ec2, job):
    cluster = tiering(workers=1, memory=2)
    made = started(ec2, job, cluster)
    made.poll()
    names = {tags(i)["deepvm:machine"]: i["InstanceId"] for i in of_run(ec2)}
    ec2.client.terminate_instances(InstanceIds=[names["memory/1"]])
    assert [(c.machine, c.why) for c in made.poll()] == [("memory/1", "lost")]
    assert made.poll() == []
    made.up([m for m in cluster.machines if m.name == "memory/1"])
    assert [(c.machine, c.state) for c in made.poll()] == [("memory/1", "up")]
    assert len({r["ClientToken"] for r in ec2.asked("CreateFleet")}) == 4  # hub, memory/1, workers, memory/1 again


def test_a_lost_hub_ends_the_run_with_a_sentence(ec2, job):
    cluster = tiering()
    made = started(ec2, job, cluster)
    made.poll()
    hub = next(i["InstanceId"] for i in of_run(ec2) if tags(i)["deepvm:machine"] == "memory/0")
    ec2.client.terminate_instances(InstanceIds=[hub])
    assert [c.machine for c in made.poll()] == ["memory/0"]
    with pytest.raises(Exception, match=r"memory/0 is lost, .* --down digits-1"):
        made.up([m for m in cluster.machines if m.name == "memory/0"])


def test_what_keeps_a_fleet_from_its_machines_is_reported_once(ec2, job, monkeypatch):
    monkeypatch.setattr(ec2_module, "TROUBLE_EVERY_S", 0.0)
    made = started(ec2, job)
    made.poll()
    made.preempt("worker/1", notice_s=0)
    made.poll()
    assert made.poll() == []
    why = {"EventSubType": "launchSpecTemporarilyBlacklisted", "EventDescription": "InsufficientInstanceCapacity"}
    ec2.history.append({"EventType": "error", "EventInformation": why, "Timestamp": "2026-11-16T00:00:00Z"})
    with pytest.raises(NoCapacity, match=r"no spot capacity for g4dn.xlarge \(worker/1\): .*Insufficient"):
        made.poll()
    assert made.poll() == []
    ec2_server.maintain_all()
    assert [c.machine for c in made.poll()] == ["worker/1"]


def test_a_smaller_cluster_is_a_smaller_fleet(ec2, job):
    made = started(ec2, job)
    made.poll()
    made.down(["worker/2"])
    ec2_server.maintain_all()
    assert [(c.machine, c.state, c.why) for c in made.poll()] == [("worker/2", "down", "stopped")]
    assert made.poll() == []
    assert [r["TargetCapacitySpecification.TotalTargetCapacity"] for r in ec2.asked("ModifyFleet")] == ["2"]
    assert ec2.actions.index("ModifyFleet") < ec2.actions.index("TerminateInstances")
    made.up([machine("worker/2", "g4dn.xlarge")])
    assert [(c.machine, c.state) for c in made.poll()] == [("worker/2", "up")]


def test_a_machine_that_is_planned_anew_moves_to_another_fleet(ec2, job):
    made = started(ec2, job)
    made.poll()
    made.preempt("worker/1", notice_s=0)
    made.poll()
    made.up([machine("worker/1", "g5.xlarge")])
    ec2_server.maintain_all()
    assert [(c.machine, c.state) for c in made.poll()] == [("worker/1", "up")]
    alive = [i["InstanceType"] for i in of_run(ec2) if i["State"]["Name"] == "running"]
    assert sorted(alive) == ["g4dn.xlarge", "g4dn.xlarge", "g5.xlarge", "r5.large"]


def test_a_machine_that_no_place_is_free_for_is_ended(ec2, job, monkeypatch):
    made = started(ec2, job)
    made.poll()
    from moto.ec2.models import ec2_backends

    fleets = ec2_backends[ec2_server.ACCOUNT][REGION].fleets.values()
    next(fleet for fleet in fleets if fleet.fleet_type == "maintain").create_spot_requests(1)
    assert made.poll() == []
    assert sum(i["State"]["Name"] == "running" for i in of_run(ec2)) == 5
    monkeypatch.setattr(ec2_module, "STRAY_S", 0.0)
    assert made.poll() == []
    assert sum(i["State"]["Name"] == "running" for i in of_run(ec2)) == 4


# Down -------------------------------------------------------------------------------------------------------------


def test_down_leaves_nothing_and_may_be_called_twice(ec2, job):
    before = everything(ec2)
    made = started(ec2, job, tiering(memory=2), volume_gb=50)
    made.poll()
    assert {kind: len(now) - len(before[kind]) for kind, now in everything(ec2).items()} == {
        "instances": 5, "fleets": 3, "templates": 3, "groups": 1, "volumes": 5,
    }  # fmt: skip
    made.down()
    assert everything(ec2) == before
    assert {c.why for c in made.poll()} == {"stopped"}
    asked = len(ec2.requests)
    made.down()
    assert everything(ec2) == before
    assert not {"TerminateInstances", "DeleteSecurityGroup"} & set(ec2.actions[asked:])


def test_another_process_ends_a_run_by_its_name_and_no_other_run(ec2, job):
    other = started(ec2, replace(job, run="other"))
    before = everything(ec2)
    started(ec2, job)
    Ec2Backend.find(RUN, REGION, settings=settings(ec2)).down()
    assert everything(ec2) == before
    assert len(other.instances()) == 4


def test_down_cleans_up_after_an_up_that_failed_in_the_middle(ec2, job, monkeypatch):
    monkeypatch.setattr("moto.settings.ENABLE_AMI_VALIDATION", True)
    before = everything(ec2)
    made = backend(ec2, job, image="ami-00000000000000000")
    for _ in range(2):  # what is left of the first attempt is used by the next
        with pytest.raises(SourceFailed, match="InvalidAMIID"):
            made.up(tiering().machines)
    with pytest.raises(SourceFailed, match="InvalidAMIID"):
        started(ec2, replace(job, env={}), image="ami-00000000000000000")  # of another process, with other user data
    assert everything(ec2)["templates"] == [f"deepvm-{RUN}-hub"]
    made.down()
    assert everything(ec2) == before


def test_what_could_not_be_deleted_is_named_and_tried_again(ec2, job, monkeypatch):
    monkeypatch.setattr(cleanup, "PAUSE_S", 0.05)
    made = started(ec2, job, release_s=0.01)
    group = ec2.client.describe_security_groups(Filters=[{"Name": "tag:deepvm:run", "Values": [RUN]}])
    group_id = group["SecurityGroups"][0]["GroupId"]
    subnet = ec2.client.describe_subnets()["Subnets"][0]["SubnetId"]
    foreign = ec2.client.create_network_interface(SubnetId=subnet, Groups=[group_id])["NetworkInterface"]
    with pytest.raises(SourceFailed, match=rf"{group_id} \(DependencyViolation\).* --down {RUN} in some minutes"):
        made.down(within_s=0.01)
    before = len(ec2.asked("DeleteSecurityGroup"))

    def free_at_the_third():
        if len(ec2.asked("DeleteSecurityGroup")) == before + 3:
            ec2.client.delete_network_interface(NetworkInterfaceId=foreign["NetworkInterfaceId"])

    monkeypatch.setitem(ec2.first, "DeleteSecurityGroup", free_at_the_third)
    Ec2Backend.find(RUN, REGION, settings=settings(ec2, release_s=60)).down()
    assert len(ec2.asked("DeleteSecurityGroup")) == before + 3


def test_a_call_that_nobody_knows_the_end_of_does_not_double_a_fleet(ec2, job, monkeypatch):
    """The relay loses requests; to EC2, which does a client token's request once, the next one is the same."""
    monkeypatch.setattr(calls, "ATTEMPTS", 2)
    made, machines = backend(ec2, job, max_usd=5.0), tiering().machines
    ec2.lose = ["CreateFleet"] * 2
    with pytest.raises(SourceFailed, match="could not be reached"):
        made.up(machines)
    made.up(machines)
    hubs, workers = ec2.asked("CreateFleet")[:-1], ec2.asked("CreateFleet")[-1]
    assert len(hubs) == 3
    assert hubs[0] == hubs[1] == hubs[2]
    assert workers["ClientToken"] != hubs[0]["ClientToken"]
    assert len(of_run(ec2)) == 4


# Secrets and dry runs ---------------------------------------------------------------------------------------------


def test_a_dry_run_shows_every_call_and_makes_none(ec2, job, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)  # it is not even needed
    told = []
    made = Ec2Backend(job, tiering(), settings(ec2, image=None, max_usd=5.0), dry_run=True, show=told.append)
    made.up(tiering().machines)
    assert made.poll() == ()
    made.down()
    assert [call.operation for call in made.calls()] == [
        "create_security_group", "authorize_security_group_ingress",
        "create_launch_template", "create_fleet", "create_tags", "create_launch_template", "create_fleet",
        "delete_fleets", "terminate_instances", "delete_launch_template", "delete_volume", "delete_security_group",
    ]  # fmt: skip
    assert ec2.requests == []
    assert [json.loads(line)["operation"] for line in told] == [call.operation for call in made.calls()]
    shown = "\n".join(told)
    assert "***" in shown
    assert "base-oss-nvidia-driver" in shown
    assert "--hub <private address of memory/0>:7069" in shown
    for secret in (TOKEN, SECRET):
        assert secret not in shown
        for at in range(3):  # nor encoded, at any place
            assert base64.b64encode(b" " * at + secret.encode())[4:-4].decode() not in shown


def test_a_run_that_is_started_again_under_its_name_makes_fleets_of_its_own(ec2, job):
    tokens = []
    for _ in range(2):
        made = backend(ec2, job, dry_run=True)
        made.up(tiering().machines)
        tokens += [call.parameters["ClientToken"] for call in made.calls() if call.operation == "create_fleet"]
    assert len(set(tokens)) == 4


def test_secrets_are_in_user_data_alone(ec2, job):
    made = started(ec2, job)
    made.poll()
    shown = "\n".join(call.to_line() for call in made.calls())
    described = str(ec2.client.describe_tags()["Tags"]) + str(of_run(ec2)) + shown
    for request in ec2.requests:
        described += str({key: value for key, value in request.items() if "UserData" not in key})
    for secret in (TOKEN, SECRET):
        assert secret not in described
        assert base64.b64encode(secret.encode())[:-4].decode() not in described


def test_all_ends_and_all_replacements_are_reported_at_once(ec2, job):
    made = started(ec2, job)
    made.poll()
    names = {tags(i)["deepvm:machine"]: i["InstanceId"] for i in of_run(ec2)}
    made.down(["worker/0"])
    ec2.client.terminate_instances(InstanceIds=[names["worker/1"], names["worker/2"]])
    assert sorted((c.machine, c.why) for c in made.poll()) == [
        ("worker/0", "stopped"), ("worker/1", "lost"), ("worker/2", "lost")
    ]  # fmt: skip
    made.up([machine(f"worker/{i}", "g4dn.xlarge") for i in range(3)])
    ec2_server.maintain_all()
    assert sorted((c.machine, c.state) for c in made.poll()) == [(f"worker/{i}", "up") for i in range(3)]
    assert made.poll() == []
