"""Groups of machines -> a security group, launch templates and fleets on EC2, for ``backend``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepvm.errors import DeepvmError, SourceFailed
from deepvm.runtime.backends.base import NoCapacity
from deepvm.runtime.backends.ec2.calls import Calls, Ec2Refused
from deepvm.runtime.backends.ec2.instances import NO_CAPACITY, instances_of
from deepvm.runtime.backends.ec2.placement import Ec2Place, find_image, find_place
from deepvm.runtime.backends.ec2.requests import (
    Ec2Group,
    Request,
    client_token,
    fleet,
    group_of,
    ingress_from_itself,
    launch_template,
    resized,
    security_group,
)
from deepvm.runtime.backends.ec2.settings import Ec2Settings
from deepvm.runtime.backends.ec2.user_data import user_data
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.run_spec import RunSpec

ADDRESS_WITHIN_S = 60.0  # EC2 describes new machines some seconds after their start


@dataclass(slots=True)
class Launcher:
    spec: RunSpec
    cluster: Cluster
    settings: Ec2Settings
    calls: Calls
    hub: str
    ends_at_s: float | None
    hub_instance: str | None = None
    hub_address: str | None = None
    place: Ec2Place | None = None
    security_group_id: str | None = None
    templates: dict[Ec2Group, str] = field(default_factory=dict)
    fleets: dict[Ec2Group, str] = field(default_factory=dict)  # ids of those that maintain themselves
    capacities: dict[Ec2Group, int] = field(default_factory=dict)  # of the same fleets
    attempts: dict[Ec2Group, int] = field(default_factory=dict)
    start_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def start(
        self, group: Ec2Group, asked: Sequence[Machine], wanted: Mapping[str, Machine]
    ) -> tuple[list[str], DeepvmError | None]:
        """Start an instant fleet. Return its instances, and the error if they are fewer than requested."""
        answer = self._fleet(group, asked, wanted)
        ids = [str(found) for row in answer.get("Instances", []) for found in row.get("InstanceIds", [])]
        if group.hub and ids:
            self.hub_instance = ids[0]
        if len(ids) >= len(asked):
            return ids, None
        first = asked[len(ids)]
        codes = sorted({str(row.get("ErrorCode", "unknown")) for row in answer.get("Errors", [])})
        if codes and not NO_CAPACITY & set(codes):
            return ids, SourceFailed(f"EC2 could not start {first.name} ({', '.join(codes)})")
        return ids, NoCapacity(first, ", ".join(codes) or "EC2 gave no reason")

    def maintain(self, group: Ec2Group, machines: Sequence[Machine], wanted: Mapping[str, Machine]) -> None:
        """Create or resize the fleet that keeps these machines running."""
        if self.capacities.get(group, 0) == len(machines):
            return
        if group in self.fleets:
            self.calls.change("ec2", "modify_fleet", resized(self.fleets[group], len(machines)))
        else:
            self.fleets[group] = self._fleet(group, machines, wanted)["FleetId"]
        self.capacities[group] = len(machines)

    def reset(self) -> None:
        """Drop what is known, after everything was deleted."""
        self.hub_instance = self.hub_address = self.security_group_id = None
        self.templates.clear()
        self.fleets.clear()
        self.capacities.clear()

    def _fleet(self, group: Ec2Group, machines: Sequence[Machine], wanted: Mapping[str, Machine]) -> Request:
        attempt = self.attempts.setdefault(group, 0)
        place = self._place()
        request = fleet(
            self.spec.run,
            group,
            count=len(machines),
            template_id=self._template(group, machines[0]),
            subnet_id=place.subnet_id,
            token=client_token(self.spec.run, self.start_id, group, attempt, [m.name for m in machines]),
            max_usd_per_hour=self._most(group, wanted),
            ends_at_s=self.ends_at_s,
        )
        ids = [f"<instance of {machine.name}>" for machine in machines]
        shown = {"FleetId": f"<fleet {group.name}>", "Instances": [{"InstanceIds": ids}]}
        try:
            answer: Request = self.calls.change("ec2", "create_fleet", request, dry_answer=shown)
        except Ec2Refused as error:
            self.attempts[group] += 1  # EC2 answered: the next attempt is a new request
            if error.code in NO_CAPACITY:
                raise NoCapacity(machines[0], error.code) from None
            raise
        self.attempts[group] += 1
        return answer

    def _most(self, group: Ec2Group, wanted: Mapping[str, Machine]) -> float | None:
        """Return what the other groups leave of the cap."""
        if self.settings.max_usd_per_hour is None:
            return None
        others = [machine for machine in wanted.values() if group_of(machine, self.hub) != group]
        return self.settings.max_usd_per_hour - sum(machine.usd_per_hour for machine in others)

    def _template(self, group: Ec2Group, machine: Machine) -> str:
        if group not in self.templates:
            image, root = find_image(self.calls, self.settings, machine)
            request = launch_template(
                self.spec.run, group, self.settings, image_id=image, root_device=root,
                security_group_id=self._security_group(), user_data=self._user_data(group, masked=False),
            )  # fmt: skip
            readable = self._user_data(group, masked=True)  # not in Base64
            shown = {**request, "LaunchTemplateData": {**request["LaunchTemplateData"], "UserData": readable}}
            name = request["LaunchTemplateName"]
            answer = {"LaunchTemplate": {"LaunchTemplateId": f"<launch template {name}>"}}
            try:
                found = self.calls.change("ec2", "create_launch_template", request, shown=shown, dry_answer=answer)
            except Ec2Refused as error:
                if error.code != "InvalidLaunchTemplateName.AlreadyExistsException":
                    raise
                # Left by an attempt that was interrupted, with another token or another hub.
                self.calls.change("ec2", "delete_launch_template", {"LaunchTemplateName": name})
                found = self.calls.change("ec2", "create_launch_template", request, shown=shown)
            self.templates[group] = found["LaunchTemplate"]["LaunchTemplateId"]
        return self.templates[group]

    def _user_data(self, group: Ec2Group, *, masked: bool) -> str:
        return user_data(
            self.spec,
            group,
            self.cluster.machines,
            name=self.hub if group.hub else f"{group.role}/auto",
            hub_address=None if group.hub else self._hub_address(),
            package=self.settings.package,
            ends_at_s=self.ends_at_s,
            masked=masked,
        )

    def _security_group(self) -> str:
        if self.security_group_id is None:
            request = security_group(self.spec.run, self._place().vpc_id)
            try:
                answer = self.calls.change(
                    "ec2", "create_security_group", request, dry_answer={"GroupId": "<security group>"}
                )
            except Ec2Refused as error:
                if error.code != "InvalidGroup.Duplicate":
                    raise
                names = [{"Name": "group-name", "Values": [request["GroupName"]]}]
                names.append({"Name": "vpc-id", "Values": [request["VpcId"]]})
                answer = self.calls.rows("ec2", "describe_security_groups", "SecurityGroups", Filters=names)[0]
            try:
                ingress = ingress_from_itself(answer["GroupId"])
                self.calls.change("ec2", "authorize_security_group_ingress", ingress)
            except Ec2Refused as error:
                if error.code != "InvalidPermission.Duplicate":
                    raise
            self.security_group_id = answer["GroupId"]
        return str(self.security_group_id)

    def _place(self) -> Ec2Place:
        if self.place is None:
            self.place = find_place(self.calls, self.settings, self.cluster.machines)
        return self.place

    def _hub_address(self) -> str:
        if self.hub_address is None and self.calls.dry_run:
            self.hub_address = f"<private address of {self.hub}>"
        ends = time.monotonic() + ADDRESS_WITHIN_S
        while self.hub_address is None:
            instances = instances_of(self.calls, self.spec.run)
            self.hub_address = next((each.address for each in instances if each.id == self.hub_instance), None)
            if self.hub_address is None:
                if time.monotonic() > ends:
                    raise SourceFailed(f"the hub ({self.hub_instance}) got no address in {ADDRESS_WITHIN_S:.0f} s")
                time.sleep(1.0)
        return self.hub_address
