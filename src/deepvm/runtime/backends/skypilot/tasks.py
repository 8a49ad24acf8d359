"""A cluster as SkyPilot's task files: one for each kind of machine. Pure: nothing is asked, nothing is written.

By hand, with the files that :func:`task_files` gives (the token in the environment, never in a file)::

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
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.run_spec import RunSpec

HUB_VARIABLE = "DEEPVM_HUB"

_RUN = re.compile(r"[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,62}[a-zA-Z0-9])?")  # what SkyPilot takes in a cluster's name
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_PLAIN_BLOCK = re.compile(r"(?:[!-~][ -~]*\n)(?:[ -~]+\n)*")  # what YAML's literal style gives back unchanged
_TRUTHS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})  # no words to YAML 1.1, in any case
_TAKEN = frozenset({variables.TOKEN, HUB_VARIABLE, "DEEPVM_FIRST", "DEEPVM_JOB"})
_FILES = {"worker": "workers", "anchor": "anchor", "memory": "memory"}
_NOTICES = frozenset({"aws", "gcp", "azure"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotSettings:
    cloud: str = "aws"
    region: str | None = None  # where the plan names none
    zone: str | None = None
    disk_gb: int = 100
    workdir: Path | None = None  # what every machine gets a copy of; None: the folder of the script
    packages: tuple[str, ...] = ("torch", "deepvm[train]")  # one pip each, so that torch is not chosen by the next one
    idle_minutes: int = 10  # a machine that has nothing to do for so long ends itself, whoever watches or not
    ask_every_s: float = 10.0
    launch_within_s: float = 1800.0
    down_within_s: float = 600.0

    def __post_init__(self) -> None:
        if self.disk_gb < 1 or self.idle_minutes < 1 or not self.packages:
            raise UsageError(
                "SkyPilot's machines need a disk of 1 GB, an idle minute and a package to install, at least"
            )
        if min(self.ask_every_s, self.launch_within_s, self.down_within_s) <= 0:
            raise UsageError("SkyPilot's waits must be longer than 0 s")


def task_files(cluster: Cluster, spec: RunSpec, settings: SkyPilotSettings) -> dict[str, str]:
    """File name -> YAML: ``RUN-anchor.yaml`` or ``RUN-memory.yaml``, and ``RUN-workers.yaml``; a role with several
    kinds of machines has several files, named after their first machine's number."""
    hub = hub_machine(cluster)
    kinds = [list(alike) for _, alike in groupby(cluster.machines, key=_kind)]
    roles = [kind[0].role for kind in kinds]
    files = {}
    for kind in kinds:
        role, number = kind[0].name.split("/")
        several = f"-{number}" if roles.count(kind[0].role) > 1 else ""
        files[f"{spec.run}-{_FILES[role]}{several}.yaml"] = task_text(
            kind, spec, settings, hub=hub.name, everybody=cluster.machines
        )
    return files


def hub_machine(cluster: Cluster) -> Machine:
    """Where machines meet: the first one that no market takes away."""
    for machine in cluster.keepers:
        if machine.market == "on-demand":
            return machine
    raise UsageError("the plan has no on-demand machine, and the hub of a run on SkyPilot needs one that stays")


def cluster_name(run: str, machine: str) -> str:
    """SkyPilot's name for a machine, each of which is a cluster of its own there."""
    if not _RUN.fullmatch(run):
        raise UsageError(
            f"a run on SkyPilot cannot be called {run!r}: letters, digits and - _ . between them, at most 64"
        )
    return f"deepvm-{run}-{machine.replace('/', '-')}"


def task_text(
    machines: Sequence[Machine],
    spec: RunSpec,
    settings: SkyPilotSettings,
    *,
    hub: str,
    everybody: Sequence[Machine],
) -> str:
    """The task of machines of one kind, numbered one after the other; ``hub``: the name of the hub's machine, which
    is told of ``everybody``."""
    first = machines[0]
    role, number = first.name.split("/")
    resources: dict[str, Any] = {
        "infra": _infra(first, settings),
        "instance_type": first.instance,
        "use_spot": first.market == "spot",
        "disk_size": settings.disk_gb,
        "autostop": {"idle_minutes": settings.idle_minutes, "down": True},
    }
    if first.market == "spot":  # for `sky jobs launch`, by hand: the same region first, where the hub can be reached
        resources["job_recovery"] = {"strategy": "FAILOVER", "max_restarts_on_errors": spec.max_restarts}
    workdir, script = _placed(spec, settings)
    has_hub = any(machine.name == hub for machine in machines)
    envs = {"DEEPVM_FIRST": number, HUB_VARIABLE: ""}
    if has_hub:
        envs["DEEPVM_JOB"] = _job_text(spec, everybody, script)
    for name in spec.env:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"{name!r} is no name of an environment variable")
        if name in _TAKEN:
            raise UsageError(
                f"{name} is what machines are told by deepvm itself: leave it out of the run's environment"
            )
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
            f"the plan names no region for {machine.name}, and machines of several regions would not reach each other: "
            "make the plan with --region, or give one here"
        )
    return "/".join([settings.cloud, region, *([zone] if zone else [])])


def _placed(spec: RunSpec, settings: SkyPilotSettings) -> tuple[str, str]:
    """The folder that is sent, and the script's path in it."""
    script = os.path.abspath(spec.script)
    folder = os.path.abspath(settings.workdir or Path(script).parent)
    if not Path(script).is_relative_to(folder):
        raise UsageError(
            f"{spec.script} is not in {folder}, which is what every machine gets: name a folder that has both"
        )
    return folder, Path(script).relative_to(folder).as_posix()


def _job_text(spec: RunSpec, machines: Sequence[Machine], script: str) -> str:
    """ASCII on one line, whatever the script's arguments are. Variables are given at the launch instead."""
    return json.dumps(replace(spec, script=script, env={}).to_hub_document(machines))


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
    port = spec.hub.rpartition(":")[2]
    if not port.isdecimal():
        raise UsageError(f"the hub's address is HOST:PORT, not {spec.hub!r}")
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
    """Mappings of plain keys to mappings, strings, numbers and truth values: all that a task file needs."""
    lines = []
    for name, value in document.items():
        key = indent + (_quoted(name) if name.lower() in _TRUTHS else name)
        if isinstance(value, Mapping):
            lines += [f"{key}:\n", *_yaml(value, indent + "  ")]
        elif isinstance(value, str) and _PLAIN_BLOCK.fullmatch(value):
            lines += [f"{key}: |\n", *(f"{indent}  {line}\n" for line in value[:-1].split("\n"))]
        else:
            lines.append(f"{key}: {_quoted(value) if isinstance(value, str) else json.dumps(value)}\n")
    return lines


def _quoted(text: str) -> str:
    """YAML's double-quoted style. JSON's is not enough: its pairs of surrogates are two characters in YAML."""
    return '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'
