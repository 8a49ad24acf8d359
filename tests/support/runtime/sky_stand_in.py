"""SkyPilot's side, played by a server in memory: launches, states and teardowns that a test decides about.

That it is called as the real one wants is checked in test_skypilot.py, against SkyPilot itself.
"""

import types
from collections import namedtuple
from pathlib import Path

import yaml

Request = namedtuple("Request", "request_id status")
Status = namedtuple("Status", "value")


class Sky(types.ModuleType):
    """``arrives``: what is launched is up at once, or refused while it is in ``sold_out``; else the test says so."""

    def __init__(self, *, arrives=False):
        super().__init__("sky")
        self.exceptions = types.SimpleNamespace(
            ResourcesUnavailableError=type("ResourcesUnavailableError", (Exception,), {}),
            ClusterDoesNotExist=type("ClusterDoesNotExist", (ValueError,), {}),
        )
        self.StatusRefreshMode = types.SimpleNamespace(FORCE="FORCE")
        self.Task = types.SimpleNamespace(from_yaml=self.from_yaml, update_secrets=dict.update)
        self.calls, self.requests, self.tasks, self.alive, self.stuck = [], {}, {}, {}, set()
        self.arrives, self.sold_out = arrives, set()

    def from_yaml(self, path):
        task = types.SimpleNamespace(**yaml.safe_load(Path(path).read_text()))
        task.update_envs, task.update_secrets = task.envs.update, task.secrets.update
        return task

    def ask(self, *call, answer=None):
        self.calls.append(call)
        self.requests[f"q{len(self.requests)}"] = answer
        return f"q{len(self.requests) - 1}"

    def launch(self, task, cluster_name=None):
        print("SkyPilot speaks on stdout")
        self.tasks[cluster_name] = task
        self.alive[cluster_name] = "INIT"
        request = self.ask("launch", cluster_name)
        if self.arrives:
            none = self.exceptions.ResourcesUnavailableError("there is no spot machine in that zone")
            self.arrive(cluster_name, none if cluster_name in self.sold_out else f"10.0.0.{len(self.of('launch'))}")
        return request

    def open_request(self, *call):
        made = zip(self.requests, self.calls, strict=True)
        return next(one for one, asked in made if asked == call and self.requests[one] is None)

    def arrive(self, name, answer):
        request = self.open_request("launch", name)
        if isinstance(answer, str):
            self.alive[name] = "UP"
            answer = (1, types.SimpleNamespace(cached_internal_ips=[answer]))
        self.requests[request] = answer

    def status(self, cluster_names=None, refresh=None):
        assert refresh == "FORCE"
        found = [{"name": name, "status": Status(self.alive[name])} for name in cluster_names if name in self.alive]
        return self.ask("status", answer=found)

    def down(self, cluster_name):
        if cluster_name in self.stuck:
            return self.ask("down", cluster_name)
        gone = self.alive.pop(cluster_name, None)
        return self.ask("down", cluster_name, answer="gone" if gone else self.exceptions.ClusterDoesNotExist("none"))

    def cancel(self, cluster_name, all=False):
        return self.ask("cancel", cluster_name, answer="cancelled")

    def api_cancel(self, request_ids=None):
        return self.ask("api_cancel", *request_ids, answer="cancelled")

    def api_status(self, request_ids=None):
        return [Request(one, "RUNNING" if self.requests[one] is None else "SUCCEEDED") for one in request_ids]

    def get(self, request_id):
        answer = self.requests[request_id]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def of(self, kind):
        return [call[1] for call in self.calls if call[0] == kind]
