"""What is asked of EC2, and what is made of its answers: places, images, fleets, refusals. No server is needed."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as known

from deepvm.errors import Infeasible, SourceFailed, UsageError
from deepvm.runtime.backends.base import NoCapacity
from deepvm.runtime.backends.ec2 import cleanup, launcher
from deepvm.runtime.backends.ec2.backend import Ec2Backend
from deepvm.runtime.backends.ec2.calls import Calls
from deepvm.runtime.backends.ec2.instances import Ec2Instance, why_down
from deepvm.runtime.backends.ec2.launcher import Launcher
from deepvm.runtime.backends.ec2.placement import cheapest_zone, find_image, find_place, region_of
from deepvm.runtime.backends.ec2.requests import Ec2Group, fleet, launch_template, resized
from deepvm.runtime.backends.ec2.settings import Ec2Settings, end_s
from deepvm.runtime.backends.ec2.user_data import MOST_BYTES, user_data
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.run_spec import RunSpec

Answer = Callable[..., Any]
NOW = datetime(2026, 11, 18, tzinfo=timezone.utc)


class Client:
    """Answers each operation by a function of its parameters, and remembers what was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, list[tuple[str, dict[str, Any]]]()

    def __getattr__(self, operation: str) -> Answer:
        def call(**parameters: Any) -> Any:
            self.asked.append((operation, parameters))
            answer = self.answers[operation]
            if isinstance(answer, list):
                answer = answer.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def of(self, operation: str) -> list[dict[str, Any]]:
        return [parameters for name, parameters in self.asked if name == operation]


def calls_of(client: Client) -> Calls:
    return Calls(region="us-east-1", _clients={"ec2": client, "ssm": client})


def refusal(code: str) -> known.ClientError:
    return known.ClientError({"Error": {"Code": code, "Message": "no"}}, "Operation")


def machine(name: str, *, market: Any = "spot", usd: float = 0.2, zone: str | None = None) -> Machine:
    role: Any = name.partition("/")[0]
    instance = "g4dn.xlarge" if role == "worker" else "r5.large"
    return Machine(
        name=name, role=role, instance=instance, market=market, usd_per_hour=usd, on_demand_usd_per_hour=0.5,
        region="us-east-1", zone=zone,
    )  # fmt: skip


MEMORY, WORKERS = machine("memory/0", market="on-demand"), (machine("worker/0"), machine("worker/1"))
CLUSTER = Cluster(
    machines=(*WORKERS, MEMORY), architecture="tiering", catalog="c", checkpoint_bytes=None, restore_s=None
)
SUBNET = {"AvailabilityZone": "us-east-1b", "SubnetId": "subnet-b", "VpcId": "vpc-1"}


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    (tmp_path / "token").write_text("the-token\n")
    (tmp_path / "train.py").write_text("print('trains')\n")
    return RunSpec(
        run="digits", script=str(tmp_path / "train.py"), args=("--lr", "0.1"), folder=tmp_path, hub="127.0.0.1:7069",
        token_file=tmp_path / "token", env={"KEY": "secret"},
    )  # fmt: skip


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_fleet_of_spot_machines_replaces_them_until_its_end() -> None:
    group = Ec2Group(role="worker", instance="g4dn.xlarge", market="spot")
    common: dict[str, Any] = {"count": 3, "template_id": "lt-1", "subnet_id": "subnet-b", "token": "t"}
    assert fleet("digits", group, **common, max_usd_per_hour=0.12345, ends_at_s=1700000000.9) == {
        "ClientToken": "t",
        "Type": "maintain",
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": "lt-1", "Version": "1"},
                "Overrides": [{"InstanceType": "g4dn.xlarge", "SubnetId": "subnet-b"}],
            }
        ],
        "TargetCapacitySpecification": {"TotalTargetCapacity": 3, "DefaultTargetCapacityType": "spot"},
        "TagSpecifications": [
            {
                "ResourceType": "fleet",
                "Tags": [
                    {"Key": "deepvm:run", "Value": "digits"},
                    {"Key": "deepvm:role", "Value": "worker"},
                    {"Key": "deepvm:group", "Value": "worker-g4dn.xlarge-spot"},
                ],
            }
        ],
        "SpotOptions": {
            "AllocationStrategy": "price-capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
            "MaxTotalPrice": "0.1235",
        },
        "ExcessCapacityTerminationPolicy": "no-termination",
        "ReplaceUnhealthyInstances": True,
        "TerminateInstancesWithExpiration": True,
        "ValidUntil": datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc),
    }
    hub = Ec2Group(role="memory", instance="r5.large", market="on-demand", hub=True)
    fixed = fleet("digits", hub, **common, max_usd_per_hour=None, ends_at_s=1.0)
    assert (fixed["Type"], fixed["OnDemandOptions"]) == ("instant", {"AllocationStrategy": "lowest-price"})
    assert not {"SpotOptions", "ValidUntil", "ReplaceUnhealthyInstances"} & set(fixed)
    assert resized("fleet-1", 2) == {
        "FleetId": "fleet-1",
        "ExcessCapacityTerminationPolicy": "no-termination",
        "TargetCapacitySpecification": {"TotalTargetCapacity": 2},
    }


def test_a_launch_template_has_what_the_settings_say() -> None:
    group = Ec2Group(role="memory", instance="r5.large", market="on-demand", hub=True)
    made = launch_template(
        "digits", group, Ec2Settings(key_name="mine", instance_profile="arn:aws:iam::1:p", volume_gb=9),
        image_id="ami-1", root_device="/dev/xvda", security_group_id="sg-1", user_data="#!x",
    )  # fmt: skip
    data = made["LaunchTemplateData"]
    assert (made["LaunchTemplateName"], data["ImageId"], data["InstanceType"]) == (
        "deepvm-digits-hub",
        "ami-1",
        "r5.large",
    )
    assert data["MetadataOptions"] == {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 1,
    }
    assert base64.b64decode(data["UserData"]) == b"#!x"
    assert (data["KeyName"], data["IamInstanceProfile"]) == ("mine", {"Arn": "arn:aws:iam::1:p"})
    assert data["BlockDeviceMappings"] == [
        {
            "DeviceName": "/dev/xvda",
            "Ebs": {"VolumeSize": 9, "VolumeType": "gp3", "DeleteOnTermination": True},
        }
    ]
    assert [each["ResourceType"] for each in data["TagSpecifications"]] == ["instance", "volume", "network-interface"]
    plain = launch_template(
        "digits", group, Ec2Settings(instance_profile="name"), image_id="i", root_device=None, security_group_id="s",
        user_data="",
    )["LaunchTemplateData"]  # fmt: skip
    assert plain["IamInstanceProfile"] == {"Name": "name"}
    assert not {"KeyName", "BlockDeviceMappings"} & set(plain)


def test_a_dry_run_shows_every_call_with_secrets_masked(spec: RunSpec) -> None:
    shown: list[str] = []
    backend = Ec2Backend(
        spec, CLUSTER, Ec2Settings(max_usd_per_hour=1.0, zone="us-east-1b"), dry_run=True, show=shown.append
    )
    backend.up(CLUSTER.machines)
    backend.down()
    found = [json.loads(line) for line in shown]
    assert [call["operation"] for call in found] == [
        "create_security_group", "authorize_security_group_ingress", "create_launch_template", "create_fleet",
        "create_tags", "create_launch_template", "create_fleet", "delete_fleets",
        "terminate_instances", "delete_launch_template",
        "delete_volume", "delete_security_group",
    ]  # fmt: skip
    assert "the-token" not in "".join(shown)
    assert "secret" not in "".join(shown)
    every = "<every one tagged deepvm:run=digits>"
    assert [call["parameters"] for call in found[-5:]] == [
        {"FleetIds": [every], "TerminateInstances": True},
        {"InstanceIds": [every]},
        {"LaunchTemplateId": every},
        {"VolumeId": every},
        {"GroupId": every},
    ]
    assert found[4]["parameters"]["Tags"] == [
        {"Key": "deepvm:machine", "Value": "memory/0"},
        {"Key": "Name", "Value": "deepvm digits memory/0"},
    ]
    hub, workers = (call["parameters"] for call in found if call["operation"] == "create_fleet")
    assert hub["LaunchTemplateConfigs"][0]["Overrides"] == [
        {"InstanceType": "r5.large", "SubnetId": "<subnet in us-east-1b>"}
    ]
    assert hub["OnDemandOptions"]["MaxTotalPrice"] == "0.6000"
    assert workers["SpotOptions"]["MaxTotalPrice"] == "0.8000"
    assert workers["TargetCapacitySpecification"]["TotalTargetCapacity"] == 2
    template = [call["parameters"] for call in found if call["operation"] == "create_launch_template"][1]
    assert "--hub <private address of memory/0>:7069 --name worker/auto" in template["LaunchTemplateData"]["UserData"]
    assert template["LaunchTemplateData"]["ImageId"].startswith("<the image that /aws/service/deeplearning/ami/x86_64/")


def test_user_data_are_at_most_what_ec2_takes(spec: RunSpec, tmp_path: Path) -> None:
    group = Ec2Group(role="worker", instance="g4dn.xlarge", market="spot")
    common: dict[str, Any] = {
        "name": "worker/auto",
        "hub_address": "10.0.0.7",
        "package": "deepvm==1",
        "ends_at_s": None,
    }
    text = user_data(spec, group, CLUSTER.machines, **common)
    packed = re.search(r"gunzip > /var/lib/deepvm/script/train\.py\n(\S+)\n", text)
    assert packed is not None
    assert gzip.decompress(base64.b64decode(packed[1])) == b"print('trains')\n"
    assert 'shutdown -h "+$((' not in text
    assert user_data(spec, group, CLUSTER.machines, **common) == text
    assert len(text.encode()) < MOST_BYTES
    (tmp_path / "train.py").unlink()
    with pytest.raises(UsageError, match="the training script cannot be read"):
        user_data(spec, group, CLUSTER.machines, **common)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"volume_gb": 7}, "volume_gb is 7: an image with torch needs at least 8"),
        ({"package": " "}, "package is ' ': it must be a requirement"),
        ({"package": "-e ."}, "it must be a requirement that pip can install"),
        ({"image": "ubuntu"}, "neither an AMI"),
        ({"image": "ami-xyz"}, "neither an AMI"),
        ({"max_usd": 0}, "max_usd is 0: it must be a number above 0"),
        ({"max_usd_per_hour": float("inf")}, "max_usd_per_hour is inf"),
        ({"release_s": -1}, "release_s is -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Ec2Settings(**options)


def test_settings_at_their_limits_are_taken() -> None:
    assert Ec2Settings(volume_gb=8, max_usd=0.01, image="/a/b-c", package="deepvm").volume_gb == 8
    assert Ec2Settings(image="ami-0af1").region is None


def test_a_total_cap_ends_a_run_at_the_plans_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepvm.runtime.backends.ec2.settings.time.time", lambda: 1000.0)
    assert end_s(Ec2Settings(), CLUSTER) is None
    assert end_s(Ec2Settings(max_usd=0.6), CLUSTER) == pytest.approx(1000.0 + 3600, abs=1.0)
    assert end_s(Ec2Settings(max_usd=0.0601), CLUSTER) is not None
    with pytest.raises(Infeasible, match=r"max_usd is \$0\.06, which pays for 5\.9 minutes at \$0\.6000/h"):
        end_s(Ec2Settings(max_usd=0.0594), CLUSTER)
    free = replace(CLUSTER, machines=tuple(replace(m, usd_per_hour=0.0) for m in CLUSTER.machines))
    with pytest.raises(SourceFailed, match="the plan has no prices, so max_usd cannot be enforced"):
        end_s(Ec2Settings(max_usd=1.0), free)


# --- places and images -----------------------------------------------------------------------------------------------


def test_the_region_is_the_settings_or_that_of_the_first_spot_machine() -> None:
    elsewhere = replace(CLUSTER, machines=(replace(MEMORY, region="eu-west-1"), *WORKERS))
    assert region_of(Ec2Settings(), elsewhere) == "us-east-1"
    assert region_of(Ec2Settings(region="ap-south-1"), elsewhere) == "ap-south-1"
    nowhere = replace(CLUSTER, machines=tuple(replace(m, region=None) for m in CLUSTER.machines))
    with pytest.raises(UsageError, match="neither the plan nor the settings name a region: add --set region=us-east-1"):
        region_of(Ec2Settings(), nowhere)


def price(zone: str, instance: str, usd: float, hours_ago: int = 0) -> dict[str, Any]:
    return {
        "AvailabilityZone": zone, "InstanceType": instance, "SpotPrice": str(usd),
        "Timestamp": NOW.replace(hour=12 - hours_ago),
    }  # fmt: skip


def test_the_cheapest_zone_has_all_types_at_their_newest_prices() -> None:
    rows = [
        price("us-east-1a", "g4dn.xlarge", 0.1, 5),
        price("us-east-1a", "g4dn.xlarge", 0.9),
        price("us-east-1b", "g4dn.xlarge", 0.5),
        price("us-east-1b", "g4dn.xlarge", 0.01, 3),
        price("us-east-1c", "r5.large", 0.01),
    ]
    client = Client(describe_spot_price_history={"SpotPriceHistory": rows})
    assert cheapest_zone(calls_of(client), CLUSTER.machines) == "us-east-1b"
    (asked,) = client.of("describe_spot_price_history")
    assert (asked["InstanceTypes"], asked["ProductDescriptions"]) == (["g4dn.xlarge"], ["Linux/UNIX"])
    assert cheapest_zone(calls_of(Client()), [MEMORY]) is None
    spot_memory = [*WORKERS, replace(MEMORY, market="spot")]
    with pytest.raises(SourceFailed, match=r"no zone of us-east-1 sells g4dn\.xlarge and r5\.large as spot machines"):
        cheapest_zone(calls_of(client), spot_memory)
    more = [*rows, price("us-east-1a", "r5.large", 0.1), price("us-east-1b", "r5.large", 9.0)]
    client.answers["describe_spot_price_history"] = {"SpotPriceHistory": more}
    assert cheapest_zone(calls_of(client), spot_memory) == "us-east-1a"


def test_the_place_is_the_default_subnet_of_the_zone() -> None:
    other = {**SUBNET, "AvailabilityZone": "us-east-1a", "SubnetId": "subnet-a"}
    client = Client(describe_subnets={"Subnets": [SUBNET, other]}, describe_spot_price_history={"SpotPriceHistory": []})
    planned = [replace(WORKERS[0], zone="us-east-1b"), MEMORY]
    place = find_place(calls_of(client), Ec2Settings(), planned)
    assert (place.zone, place.subnet_id, place.vpc_id) == ("us-east-1a", "subnet-a", "vpc-1")
    assert client.of("describe_subnets")[0]["Filters"] == [
        {"Name": "default-for-az", "Values": ["true"]},
        {"Name": "availability-zone", "Values": ["us-east-1b"]},
    ]
    find_place(calls_of(client), Ec2Settings(), [MEMORY])
    assert client.of("describe_subnets")[1]["Filters"] == [{"Name": "default-for-az", "Values": ["true"]}]
    find_place(calls_of(client), Ec2Settings(zone="us-east-1a"), [replace(WORKERS[0], zone="us-east-1b")])
    assert client.of("describe_subnets")[2]["Filters"][1]["Values"] == ["us-east-1a"]


def test_a_zone_without_a_subnet_and_a_subnet_of_another_zone_are_refused() -> None:
    client = Client(describe_subnets={"Subnets": []})
    with pytest.raises(SourceFailed, match="us-east-1b has no default subnet: add --set subnet_id=subnet-…"):
        find_place(calls_of(client), Ec2Settings(zone="us-east-1b"), [MEMORY])
    client = Client(describe_subnets={"Subnets": [SUBNET]})
    assert find_place(calls_of(client), Ec2Settings(subnet_id="subnet-b"), [MEMORY]).zone == "us-east-1b"
    assert client.of("describe_subnets") == [{"SubnetIds": ["subnet-b"]}]
    with pytest.raises(UsageError, match="zone is us-east-1a, but subnet-b is in us-east-1b: leave one of them out"):
        find_place(calls_of(client), Ec2Settings(zone="us-east-1a", subnet_id="subnet-b"), [MEMORY])


def test_an_image_and_its_first_disk_are_found() -> None:
    client = Client(
        get_parameter={"Parameter": {"Value": "ami-7"}},
        describe_images=[{"Images": [{"RootDeviceName": "/dev/xvda"}]}, {"Images": [{}]}, {"Images": []}],
    )
    assert find_image(calls_of(client), Ec2Settings(image="ami-1"), MEMORY) == ("ami-1", None)
    assert find_image(calls_of(client), Ec2Settings(volume_gb=9), MEMORY) == ("ami-7", "/dev/xvda")
    assert client.of("get_parameter") == [
        {"Name": "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id"}
    ]
    assert find_image(calls_of(client), Ec2Settings(image="ami-1", volume_gb=9), MEMORY) == ("ami-1", "/dev/sda1")
    with pytest.raises(SourceFailed, match=r"image ami-1 does not exist in us-east-1: add --set image=ami-…"):
        find_image(calls_of(client), Ec2Settings(image="ami-1", volume_gb=9), MEMORY)
    client.answers["get_parameter"] = refusal("ParameterNotFound")
    with pytest.raises(SourceFailed, match="/none names no image; add --set image=ami-…"):
        find_image(calls_of(client), Ec2Settings(image="/none"), MEMORY)


# --- starting --------------------------------------------------------------------------------------------------------


def launcher_of(client: Client, spec: RunSpec, **settings: Any) -> Launcher:
    client.answers = {
        "describe_subnets": {"Subnets": [SUBNET]},
        "create_security_group": {"GroupId": "sg-1"},
        "authorize_security_group_ingress": {},
        "create_launch_template": {"LaunchTemplate": {"LaunchTemplateId": "lt-1"}},
        "describe_instances": {"Reservations": []},
        **client.answers,
    }
    chosen = Ec2Settings(**{"zone": "us-east-1b", "image": "ami-1", **settings})
    return Launcher(
        spec=spec, cluster=CLUSTER, settings=chosen, calls=calls_of(client), hub="memory/0", ends_at_s=None
    )  # fmt: skip


HUB = Ec2Group(role="memory", instance="r5.large", market="on-demand", hub=True)
FIXED = Ec2Group(role="worker", instance="g4dn.xlarge", market="on-demand")


def test_a_fleet_that_is_whole_is_no_error_and_the_hub_is_remembered(spec: RunSpec) -> None:
    client = Client(create_fleet={"Instances": [{"InstanceIds": ["i-1"]}]})
    made = launcher_of(client, spec)
    assert made.start(HUB, [MEMORY], {"memory/0": MEMORY}) == (["i-1"], None)
    assert made.hub_instance == "i-1"
    (asked,) = client.of("create_fleet")
    assert "MaxTotalPrice" not in asked["OnDemandOptions"]


@pytest.mark.parametrize(
    ("errors", "kind", "problem"),
    [
        ([], NoCapacity, "worker/1"),
        ([{"ErrorCode": "InsufficientInstanceCapacity"}, {"ErrorCode": "Other"}], NoCapacity, "worker/1"),
        (
            [{"ErrorCode": "InvalidParameter"}, {}],
            SourceFailed,
            r"could not start worker/1 \(InvalidParameter, unknown\)",
        ),
    ],
)
def test_a_fleet_that_lacks_machines_says_which_and_why(
    spec: RunSpec, errors: list[dict[str, str]], kind: type[Exception], problem: str
) -> None:
    client = Client(create_fleet={"Instances": [{"InstanceIds": ["i-1"]}], "Errors": errors})
    made = launcher_of(client, spec)
    made.hub_address = "10.0.0.7"
    ids, error = made.start(FIXED, WORKERS, {})
    assert (ids, type(error)) == (["i-1"], kind)
    assert re.search(problem, str(error))
    assert made.hub_instance is None


def test_a_refused_fleet_is_asked_for_with_another_token_and_a_lost_answer_with_the_same(spec: RunSpec) -> None:
    lost = known.ReadTimeoutError(endpoint_url="x")
    client = Client(create_fleet=[lost, lost, refusal("InsufficientInstanceCapacity"), refusal("InvalidFleet"), {}])
    made = launcher_of(client, spec)
    made.hub_address = "10.0.0.7"
    for kind in (SourceFailed, SourceFailed, NoCapacity, SourceFailed):
        with pytest.raises(kind):
            made.start(FIXED, WORKERS, {})
    made.start(FIXED, WORKERS, {})
    tokens = [asked["ClientToken"] for asked in client.of("create_fleet")]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(tokens)) == 3
    assert len(client.of("create_launch_template")) == 1


def test_fleets_that_maintain_themselves_are_made_once_and_then_resized(spec: RunSpec) -> None:
    client = Client(create_fleet={"FleetId": "fleet-1"}, modify_fleet={})
    made, group = launcher_of(client, spec), Ec2Group(role="worker", instance="g4dn.xlarge", market="spot")
    made.hub_address = "10.0.0.7"
    for count in (2, 2, 1, 0):
        made.maintain(group, WORKERS[:count], {})
    assert len(client.of("create_fleet")) == 1
    assert [asked["TargetCapacitySpecification"]["TotalTargetCapacity"] for asked in client.of("modify_fleet")] == [
        1,
        0,
    ]
    made.reset()
    assert (made.fleets, made.templates, made.capacities, made.security_group_id) == ({}, {}, {}, None)
    assert (made.hub_address, made.hub_instance) == (None, None)


def test_what_an_interrupted_attempt_left_is_used_or_replaced(spec: RunSpec) -> None:
    client = Client(
        create_fleet={"Instances": [{"InstanceIds": ["i-1"]}]},
        create_security_group=refusal("InvalidGroup.Duplicate"),
        describe_security_groups={"SecurityGroups": [{"GroupId": "sg-old"}]},
        authorize_security_group_ingress=refusal("InvalidPermission.Duplicate"),
        create_launch_template=[
            refusal("InvalidLaunchTemplateName.AlreadyExistsException"),
            {"LaunchTemplate": {"LaunchTemplateId": "lt-2"}},
        ],
        delete_launch_template={},
    )  # fmt: skip
    made = launcher_of(client, spec)
    made.start(HUB, [MEMORY], {})
    assert client.of("delete_launch_template") == [{"LaunchTemplateName": "deepvm-digits-hub"}]
    assert made.security_group_id == "sg-old"
    assert [row["Values"] for row in client.of("describe_security_groups")[0]["Filters"]] == [
        ["deepvm-digits"],
        ["vpc-1"],
    ]
    assert made.templates == {HUB: "lt-2"}


@pytest.mark.parametrize(
    "operation", ["create_security_group", "authorize_security_group_ingress", "create_launch_template"]
)
def test_other_refusals_end_the_start(spec: RunSpec, operation: str) -> None:
    client = Client(**{operation: refusal("VpcLimitExceeded")})
    with pytest.raises(SourceFailed, match="VpcLimitExceeded"):
        launcher_of(client, spec).start(HUB, [MEMORY], {})


def test_the_hubs_address_is_waited_for(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"InstanceId": "i-1", "State": {"Name": "running"}, "LaunchTime": NOW, "PrivateIpAddress": "10.0.0.7"}
    pauses: list[float] = []
    monkeypatch.setattr(launcher.time, "sleep", pauses.append)
    client = Client(
        create_fleet={"FleetId": "f"},
        describe_instances=[
            {"Reservations": []},
            {"Reservations": [{"Instances": [{**row, "InstanceId": "i-0"}, row]}]},
        ],
    )
    made = launcher_of(client, spec)
    made.hub_instance = "i-1"
    made.maintain(Ec2Group(role="worker", instance="g4dn.xlarge", market="spot"), WORKERS, {})
    assert (made.hub_address, pauses) == ("10.0.0.7", [1.0])
    late = launcher_of(Client(), spec)
    late.hub_instance = "i-1"
    monkeypatch.setattr(launcher, "ADDRESS_WITHIN_S", -1.0)
    with pytest.raises(SourceFailed, match=r"the hub \(i-1\) got no address"):
        late.maintain(Ec2Group(role="worker", instance="g4dn.xlarge", market="spot"), WORKERS, {})


# --- the end ---------------------------------------------------------------------------------------------------------


def ending(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Client:
    monkeypatch.setattr(cleanup.time, "sleep", lambda _: None)
    nothing = {
        "describe_tags": {"Tags": []},
        "describe_instances": {"Reservations": []},
        "describe_launch_templates": {"LaunchTemplates": []},
        "describe_volumes": {"Volumes": []},
        "describe_security_groups": {"SecurityGroups": []},
        "terminate_instances": {},
        "delete_launch_template": {},
        "delete_volume": {},
        "delete_security_group": {},
        "delete_fleets": {},
    }
    return Client(**{**nothing, **answers})


def test_everything_of_a_run_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    def instance(name: str, state: str) -> dict[str, Any]:
        return {"InstanceId": name, "State": {"Name": state}, "LaunchTime": NOW}

    client = ending(
        monkeypatch,
        describe_tags={"Tags": [{"ResourceId": f"fleet-{n:02}"} for n in range(26)]},
        describe_instances=[
            {"Reservations": [{"Instances": [instance("i-1", "running"), instance("i-2", "shutting-down")]}]},
            {"Reservations": [{"Instances": [instance("i-1", "terminated")]}]},
        ],
        describe_launch_templates={"LaunchTemplates": [{"LaunchTemplateId": "lt-1"}]},
        describe_volumes={"Volumes": [{"VolumeId": "vol-1"}]},
        describe_security_groups={"SecurityGroups": [{"GroupId": "sg-1"}]},
        delete_volume=[refusal("VolumeInUse"), {}],
        delete_security_group=refusal("InvalidGroup.NotFound"),
        delete_fleets=[
            {"UnsuccessfulFleetDeletions": [{"FleetId": "fleet-01", "Error": {"Code": "fleetIdDoesNotExist"}}]}, {},
        ],
    )  # fmt: skip
    cleanup.release(calls_of(client), "digits", within_s=60)
    assert [len(asked["FleetIds"]) for asked in client.of("delete_fleets")] == [25, 1]
    assert client.of("terminate_instances") == [{"InstanceIds": ["i-1"]}]
    assert client.of("delete_launch_template") == [{"LaunchTemplateId": "lt-1"}]
    assert client.of("delete_volume") == [{"VolumeId": "vol-1"}] * 2
    assert client.of("delete_security_group") == [{"GroupId": "sg-1"}]


def test_what_is_left_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    running = {"InstanceId": "i-1", "State": {"Name": "running"}, "LaunchTime": NOW}
    client = ending(
        monkeypatch,
        describe_tags={"Tags": [{"ResourceId": "fleet-1"}]},
        delete_fleets={
            "UnsuccessfulFleetDeletions": [{"FleetId": "fleet-1", "Error": {"Code": "odd"}}, {"FleetId": "f2"}]
        },
        describe_instances={"Reservations": [{"Instances": [running]}]},
        describe_security_groups={"SecurityGroups": [{"GroupId": "sg-1"}]},
        delete_security_group=refusal("DependencyViolation"),
        describe_launch_templates={"LaunchTemplates": [{"LaunchTemplateId": "lt-1"}]},
        delete_launch_template=refusal("Odd"),
    )
    with pytest.raises(SourceFailed) as caught:
        cleanup.release(calls_of(client), "digits", within_s=-1.0)
    for words in ("fleet-1 (odd)", "f2 (unknown)", "i-1 (running)", "lt-1 (Odd)", "sg-1 (DependencyViolation)"):
        assert words in str(caught.value)
    client.answers["delete_fleets"] = refusal("Unavailable")
    with pytest.raises(SourceFailed, match=r"fleet-1 \(Unavailable\)"):
        cleanup.release(calls_of(client), "digits", within_s=-1.0)


@pytest.mark.parametrize(
    ("reason", "over", "why"),
    [
        ("Server.SpotInstanceTermination", False, "preempted"),
        ("Server.SpotInstanceShutdown", True, "preempted"),
        ("Client.InstanceInitiatedShutdown", True, "ended"),
        ("Client.InstanceInitiatedShutdown", False, "failed"),
        ("Client.UserInitiatedShutdown", True, "lost"),
    ],
)
def test_why_a_machine_ended(reason: str, over: bool, why: str) -> None:
    ended = Ec2Instance(
        id="i", state="terminated", group=None, machine=None, address=None, reason=reason, launched=NOW
    )  # fmt: skip
    assert why_down(ended, own=None, over=over) == why
    assert why_down(ended, own="left", over=over) == "left"
    assert why_down(None, own=None, over=over) == "lost"
    assert not ended.alive
    assert replace(ended, state="pending").alive
