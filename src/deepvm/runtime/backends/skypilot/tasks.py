"""A cluster -> SkyPilot's task files, one for each kind of machine. Pure; ``backend`` launches them.

By hand, with the files of :func:`task_files` (the token in the environment, never in a file)::

    sky launch -c deepvm-RUN-anchor-0 RUN-anchor.yaml --secret DEEPVM_TOKEN
    sky launch -c deepvm-RUN-workers RUN-workers.yaml --secret DEEPVM_TOKEN --env DEEPVM_HUB=10.0.0.9:7171
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from deepvm import variables
from deepvm.errors import UsageError
from deepvm.protocol.addresses import split_address
from deepvm.runtime.cluster import Cluster, Machine, hub_of
from deepvm.runtime.run_spec import RunSpec

HUB_VARIABLE = "DEEPVM_HUB"

_RUN = re.compile(r"[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,62}[a-zA-Z0-9])?")  # in the name of a SkyPilot cluster
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_PLAIN_BLOCK = re.compile(r"(?:[!-~][ -~]*\n)(?:[ -~]+\n)*")  # unchanged by YAML's literal style
_NOT_STRINGS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})  # in YAML 1.1, in any case
_RESERVED = frozenset({variables.TOKEN, HUB_VARIABLE, "DEEPVM_FIRST", "DEEPVM_JOB"})
_FILES = {"worker": "workers", "anchor": "anchor", "memory": "memory"}
_NOTICES = frozenset({"aws", "gcp", "azure"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotSettings:
    cloud: str = "aws"
    region: str | None = None  # if the plan names none
    zone: str | None = None
    disk_gb: int = 100
    workdir: Path | None = None  # copied to every machine; None: the folder of the script
    packages: tuple[str, ...] = ("torch", "deepvm[train]")  # one pip call each: the second keeps the first's torch
    idle_minutes: int = 10  # after which an idle machine ends itself
    ask_every_s: float = 10.0
    launch_within_s: float = 1800.0
    down_within_s: float = 600.0

    def __post_init__(self) -> None:
        if self.disk_gb < 1 or self.idle_minutes < 1 or not self.packages:
            raise UsageError(
                f"disk_gb ({self.disk_gb}) and idle_minutes ({self.idle_minutes}) must be at least 1, "
                "and packages must not be empty"
            )
        if min(self.ask_every_s, self.launch_within_s, self.down_within_s) <= 0:
            raise UsageError("ask_every_s, launch_within_s and down_within_s must be above 0")


def task_files(cluster: Cluster, spec: RunSpec, settings: SkyPilotSettings) -> dict[str, str]:
    """Return YAML by file name: ``RUN-anchor.yaml`` or ``RUN-memory.yaml``, and ``RUN-workers.yaml``. A role with
    several kinds of machines has several files, with the number of their first machine."""
    hub = hub_of(cluster)
    kinds = [list(alike) for _, alike in groupby(cluster.machines, key=_kind)]
    roles = [kind[0].role for kind in kinds]
    files = {}
    for kind in kinds:
        role, number = kind[0].name.split("/")
        several = f"-{number}" if roles.count(kind[0].role) > 1 else ""
        files[f"{spec.run}-{_FILES[role]}{several}.yaml"] = task_text(
            kind, spec, settings, hub=hub.name, all_machines=cluster.machines
        )
    return files


def cluster_name(run: str, machine: str) -> str:
    """Return the name of a machine's SkyPilot cluster."""
    if not _RUN.fullmatch(run):
        raise UsageError(
            f"{run!r} is not a valid run name on SkyPilot: use letters and digits, with - _ . between them, at most 64"
        )
    return f"deepvm-{run}-{machine.replace('/', '-')}"


def task_text(
    machines: Sequence[Machine],
    spec: RunSpec,
    settings: SkyPilotSettings,
    *,
    hub: str,
    all_machines: Sequence[Machine],
) -> str:
    """Return the task of machines of one kind, with consecutive numbers. The machine named ``hub`` gets the list of all
    machines."""
    first = machines[0]
    settings = replace(settings, cloud=first.cloud or settings.cloud)
    host, _, gpus = first.instance.partition("+")  # a host of Google's with GPUs: n1-standard-8+T4:1
    role, number = first.name.split("/")
    resources: dict[str, Any] = {
        "infra": _infra(first, settings),
        "instance_type": host,
        **({"accelerators": gpus} if gpus else {}),
        "use_spot": first.market == "spot",
        "disk_size": settings.disk_gb,
        "autostop": {"idle_minutes": settings.idle_minutes, "down": True},
    }
    if first.market == "spot":  # for `sky jobs launch`, by hand: the region of the hub first
        resources["job_recovery"] = {"strategy": "FAILOVER", "max_restarts_on_errors": spec.max_restarts}
    workdir, script = _placed(spec, settings)
    has_hub = any(machine.name == hub for machine in machines)
    envs = {"DEEPVM_FIRST": number, HUB_VARIABLE: ""}
    if has_hub:
        # ASCII on one line, whatever the script's arguments are; the environment is given at the launch instead.
        envs["DEEPVM_JOB"] = json.dumps(replace(spec, script=script, env={}).to_hub_document(all_machines))
    for name in spec.env:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"{name!r} is not a valid name of an environment variable")
        if name in _RESERVED:
            raise UsageError(f"{name} is set by deepvm itself: leave it out of the run's environment")
    document = {
        "name": cluster_name(spec.run, first.name),
        "num_nodes": len(machines),
        "workdir": workdir,
        "resources": resources,
        "envs": envs,
        "secrets": dict.fromkeys([variables.TOKEN, *spec.env], ""),  # their values are given at the launch
        "setup": _setup(settings),
        "run": _run(role, spec, settings, hub=hub if has_hub else None, spot=first.market == "spot"),
    }
    return "".join(_yaml(document))


def _kind(machine: Machine) -> tuple[object, ...]:
    return machine.role, machine.instance, machine.market, machine.region, machine.zone


def _infra(machine: Machine, settings: SkyPilotSettings) -> str:
    region, zone = machine.region or settings.region, machine.zone or settings.zone
    if region is None:
        raise UsageError(
            f"the plan names no region for {machine.name}, and machines of different regions cannot connect: "
            "plan with --region, or add --set region=us-east-1"
        )
    return "/".join([settings.cloud, region, *([zone] if zone else [])])


def _placed(spec: RunSpec, settings: SkyPilotSettings) -> tuple[str, str]:
    """Return the folder that is copied to machines, and the script's path in it."""
    script = os.path.abspath(spec.script)
    folder = os.path.abspath(settings.workdir or Path(script).parent)
    if not Path(script).is_relative_to(folder):
        raise UsageError(f"{spec.script} is not in {folder}, which is copied to machines: set workdir to its folder")
    return folder, Path(script).relative_to(folder).as_posix()


def _setup(settings: SkyPilotSettings) -> str:
    packages = "\n".join(f'"$venv/bin/python" -m pip install --quiet {shlex.quote(each)}' for each in settings.packages)
    return f"""\
set -eu
venv=$HOME/.deepvm/venv
uv=$(command -v uv || echo "$HOME/.local/bin/uv")
if [ ! -x "$venv/bin/pip" ]; then
  if [ -x "$uv" ]; then "$uv" venv --quiet --seed --python '>=3.10' "$venv"; else python3 -m venv "$venv"; fi
fi
{packages}
"""


def _run(role: str, spec: RunSpec, settings: SkyPilotSettings, *, hub: str | None, spot: bool) -> str:
    port = split_address(spec.hub)[1]
    source = (settings.cloud if settings.cloud in _NOTICES else "auto") if spot else "none"
    text = f"""\
set -eu
umask 077
: "${{{variables.TOKEN}:?is empty, give it with --secret {variables.TOKEN}}}"
folder=$HOME/.deepvm/runs/{spec.run}
mkdir -p "$folder"
printf '%s\\n' "${variables.TOKEN}" > "$folder/token"
unset {variables.TOKEN}
name={role}/$((DEEPVM_FIRST + SKYPILOT_NODE_RANK))
address=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")
python=$HOME/.deepvm/venv/bin/python
"""
    if hub is None:
        text += f': "${{{HUB_VARIABLE}:?is empty, give it with --env {HUB_VARIABLE}=HOST:{port}}}"\n'
    else:
        text += f"""\
{HUB_VARIABLE}=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | sed -n 1p):{port}
if [ "$name" = {hub} ]; then
  printf '%s\\n' "$DEEPVM_JOB" > "$folder/job.json"
  "$python" -m deepvm.runtime.hub --listen "${HUB_VARIABLE}" --job "$folder/job.json" \
--token-file "$folder/token" --folder "$folder" &
  trap "kill $!" EXIT
fi
"""
    return (
        text
        + f"""\
"$python" -m deepvm.runtime.agent --hub "${HUB_VARIABLE}" --name "$name" --token-file "$folder/token" \
--folder "$folder" --address "$address" --notices {source}
"""
    )


def _yaml(document: Mapping[str, Any], indent: str = "") -> list[str]:
    """Write mappings, strings, numbers and booleans as YAML: all that a task file needs."""
    lines = []
    for name, value in document.items():
        key = indent + (_quoted(name) if name.lower() in _NOT_STRINGS else name)
        if isinstance(value, Mapping):
            lines += [f"{key}:\n", *_yaml(value, indent + "  ")]
        elif isinstance(value, str) and _PLAIN_BLOCK.fullmatch(value):
            lines += [f"{key}: |\n", *(f"{indent}  {line}\n" for line in value[:-1].split("\n"))]
        else:
            lines.append(f"{key}: {_quoted(value) if isinstance(value, str) else json.dumps(value)}\n")
    return lines


def _quoted(text: str) -> str:
    """Quote text in YAML's double-quoted style. JSON's surrogate pairs would be two characters in YAML."""
    return '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'
