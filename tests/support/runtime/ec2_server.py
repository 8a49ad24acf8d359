"""A moto server on loopback behind a relay that sees every request; and what moto lacks of fleets."""

import http.client
import logging
import threading
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl

import pytest

ACCOUNT, REGION = "123456789012", "us-east-1"
IMAGE = "ami-12c6146b"  # one that moto knows
REFUSAL = "<Response><Errors><Error><Code>{code}</Code><Message>No.</Message></Error></Errors></Response>"


class Relay:
    """Between boto3 and moto: remembers what was asked, and can lose it."""

    def __init__(self, host, port):
        self.requests = []  # of each: its parameters, flat, as EC2's protocol has them
        self.lose = []  # actions, each to be lost once
        self.refuse = []  # (action, code), each to be answered once with that error
        self.first = {}  # action -> what is done before it is passed on
        self.history = []  # events that fleets tell

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler):
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                asked = dict(parse_qsl(body.decode(), keep_blank_values=True))
                asked.setdefault("Action", handler.headers.get("X-Amz-Target", ""))
                self.requests.append(asked)
                if asked["Action"] in self.lose:
                    self.lose.remove(asked["Action"])
                    handler.close_connection = True
                    return
                for action, code in self.refuse:
                    if action == asked["Action"]:
                        self.refuse.remove((action, code))
                        handler.answer(400, REFUSAL.format(code=code).encode(), "text/xml")
                        return
                self.first.get(asked["Action"], lambda: None)()
                moto = http.client.HTTPConnection(host, port, timeout=30)
                moto.request("POST", handler.path, body, dict(handler.headers.items()))
                answer = moto.getresponse()
                text = answer.read()
                moto.close()
                handler.answer(answer.status, text, answer.headers.get("Content-Type", "text/xml"))

            def answer(handler, status, text, kind):
                handler.send_response(status)
                handler.send_header("Content-Type", kind)
                handler.send_header("Content-Length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)

            def log_message(handler, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reset(self):
        """A region with nothing in it but what every account has, and nothing asked."""
        moto = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=30)
        moto.request("POST", "/moto-api/reset", b"")
        moto.getresponse().read()
        moto.close()
        self.forget()

    def tidy(self):
        """The same for less, after a test that left nothing: EC2 forgets ended machines after an hour, moto never."""
        from moto.ec2.models import ec2_backends

        if remains():
            self.reset()
        ec2_backends[ACCOUNT][REGION].reservations.clear()
        self.forget()

    def forget(self):
        for forgotten in (self.requests, self.history, self.lose, self.refuse, self.first):
            forgotten.clear()

    def asked(self, action):
        return [request for request in self.requests if request["Action"] == action]

    @property
    def actions(self):
        return [request["Action"] for request in self.requests]

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


def complete_moto(relay, patch):
    """What EC2 documents and moto lacks, in moto's own server: ModifyFleet and DescribeFleetHistory; DeleteFleets of
    one that does not exist, or has no machines any more; security groups that are in use and so stay."""
    from moto.core.responses import ActionResult
    from moto.ec2.exceptions import DependencyViolationError
    from moto.ec2.models.fleets import Fleet
    from moto.ec2.responses.fleets import Fleets
    from moto.ec2.responses.security_groups import SecurityGroups

    def modify_fleet(self):
        fleet = self.ec2_backend.get_fleet(self._get_param("FleetId"))
        fleet.target_capacity = int(self._get_param("TargetCapacitySpecification")["TotalTargetCapacity"])
        maintain(fleet)
        return ActionResult({"Return": True})

    def describe_fleet_history(self):
        return ActionResult({"FleetId": self._get_param("FleetId"), "HistoryRecords": relay.history})

    def delete_fleets(self):
        asked = self._get_param("FleetIds", [])
        known = [fleet for fleet in asked if self.ec2_backend.get_fleet(fleet)]
        for fleet in self.ec2_backend.delete_fleets(known, True):
            assert fleet.state == "deleted_terminating"
        error = {"Code": "fleetIdDoesNotExist", "Message": "The fleet does not exist"}
        unknown = [{"FleetId": fleet, "Error": error} for fleet in asked if fleet not in known]
        return ActionResult({"UnsuccessfulFleetDeletions": unknown})

    terminate, delete_group = Fleet.terminate_instances, SecurityGroups.delete_security_group

    def terminate_instances(fleet):
        if fleet.spot_requests or fleet.on_demand_instances:
            terminate(fleet)

    def delete_security_group(self):
        group = self._get_param("GroupId")
        if any(group in [used.id for used in eni.group_set] for eni in self.ec2_backend.enis.values()):
            raise DependencyViolationError(f"resource {group} has a dependent object")
        return delete_group(self)

    patch.setattr(Fleets, "modify_fleet", modify_fleet, raising=False)
    patch.setattr(Fleets, "describe_fleet_history", describe_fleet_history, raising=False)
    patch.setattr(Fleets, "delete_fleets", delete_fleets)
    patch.setattr(Fleet, "terminate_instances", terminate_instances)
    patch.setattr(SecurityGroups, "delete_security_group", delete_security_group)


def maintain(fleet):
    """What EC2 does by itself for a fleet of this type: as many machines as it should have."""
    alive = [request for request in fleet.spot_requests if request.instance.state == "running"]
    if fleet.state == "active" and len(alive) < fleet.target_capacity:
        fleet.create_spot_requests(fleet.target_capacity - len(alive))


def maintain_all():
    from moto.ec2.models import ec2_backends

    for fleet in ec2_backends[ACCOUNT][REGION].fleets.values():
        if fleet.fleet_type == "maintain":
            maintain(fleet)


def preempt(instance_id):
    """As the spot market does: whoever asks meanwhile sees no other reason."""
    from moto.ec2.models import ec2_backends, instances

    reason = instances.StateReason("Server.SpotInstanceTermination", "Server.SpotInstanceTermination")
    backend = ec2_backends[ACCOUNT][REGION]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instances, "StateReason", lambda *_: reason)
        backend.get_instance(instance_id).state_reason = reason
        backend.terminate_instances([instance_id])


@contextmanager
def moto_behind_relay():
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    relay = Relay(*server.get_host_and_port())
    try:
        with pytest.MonkeyPatch.context() as patch:
            complete_moto(relay, patch)
            yield relay
    finally:
        relay.close()
        server.stop()


@cache
def _session():
    import boto3

    return boto3.Session()  # which reads EC2's long description once


@contextmanager
def account():
    """The relay, with credentials for it in the environment, and a client for tests to look with."""
    import boto3

    with pytest.MonkeyPatch.context() as patch, moto_behind_relay() as relay:
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7NOBODY")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        shared = _session()
        patch.setattr(boto3, "Session", lambda: shared)
        relay.client = shared.client("ec2", region_name=REGION, endpoint_url=relay.url)
        yield relay


def everything(ec2):
    """All that can cost or be in the way, whosever it is. (moto keeps the network interfaces of ended machines.)"""
    client = ec2.client
    instances = [i for r in client.describe_instances()["Reservations"] for i in r["Instances"]]
    return {
        "instances": sorted(i["InstanceId"] for i in instances if i["State"]["Name"] != "terminated"),
        "fleets": sorted(f["FleetId"] for f in client.describe_fleets()["Fleets"] if f["FleetState"] == "active"),
        "templates": sorted(t["LaunchTemplateName"] for t in client.describe_launch_templates()["LaunchTemplates"]),
        "groups": sorted(g["GroupName"] for g in client.describe_security_groups()["SecurityGroups"]),
        "volumes": sorted(v["VolumeId"] for v in client.describe_volumes()["Volumes"]),
    }


def remains():
    """The same but for what every account has, in words and much faster: looked up in moto's own memory."""
    from moto.ec2.models import ec2_backends

    backend = ec2_backends[ACCOUNT][REGION]
    return [
        *(f"instance {i.id}" for i in backend.all_instances() if i.state != "terminated"),
        *(f"fleet {fleet.id}" for fleet in backend.fleets.values() if fleet.state == "active"),
        *(f"template {template}" for template in backend.launch_templates),
        *(f"group {g.name}" for groups in backend.groups.values() for g in groups.values() if g.name != "default"),
        *(f"volume {volume}" for volume in backend.volumes),
    ]


def machines_of(ec2, run):
    """Machine -> instance, of those that run and have a name."""
    filters = [{"Name": "tag:deepvm:run", "Values": [run]}, {"Name": "instance-state-name", "Values": ["running"]}]
    rows = [i for r in ec2.client.describe_instances(Filters=filters)["Reservations"] for i in r["Instances"]]
    named = [({tag["Key"]: tag["Value"] for tag in row["Tags"]}, row) for row in rows]
    return {tags["deepvm:machine"]: row for tags, row in named if "deepvm:machine" in tags}
