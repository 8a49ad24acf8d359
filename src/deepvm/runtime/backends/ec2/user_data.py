"""A run and a group -> the bash script (user data) that installs deepvm on a new EC2 machine and joins the run.

The user data contain the token and the run's environment (its key). The account's owners and processes on the machine
can read them. The script writes both to files of root, and shows them in no process list. Neither crosses the network
between machines. None of it has run on EC2 itself yet.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepvm.errors import UsageError
from deepvm.protocol.addresses import split_address
from deepvm.runtime.backends.ec2.requests import Ec2Group
from deepvm.runtime.cluster import Machine
from deepvm.runtime.run_spec import RunSpec

MOST_BYTES = 16 * 1024  # EC2's limit of user data, before encoding
TORCH = "torch>=2.4,<3"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"  # for machines without a GPU: several GB less
SETTINGS, FOLDER, VENV = "/etc/deepvm", "/var/lib/deepvm", "/opt/deepvm"
MASK = "***"
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def script_path(spec: RunSpec) -> str:
    return f"{FOLDER}/script/{Path(spec.script).name}"


def hub_job(spec: RunSpec, machines: Iterable[Machine]) -> dict[str, Any]:
    """Return the document that the hub reads on its machine, and sends to others: without the environment."""
    return replace(spec, script=script_path(spec), env={}).to_hub_document(machines)


def user_data(
    spec: RunSpec,
    group: Ec2Group,
    machines: Iterable[Machine],
    *,
    name: str,  # of the machine; as ROLE/auto, the hub assigns a free name of that role
    hub_address: str | None,  # None on the hub itself
    package: str,
    ends_at_s: float | None,
    masked: bool = False,
) -> str:
    token = MASK.encode() if masked else _read(spec.token_file, "the run's token").strip() + b"\n"
    script = _read(Path(spec.script), "the training script")
    hub = "$address" if group.hub else hub_address
    parts = [
        "#!/bin/bash",
        f"# deepvm: the {group.name} machines of run {spec.run}",
        "set -euo pipefail",
        "umask 077",
        *_ending(ends_at_s),
        # A machine that cannot join costs money: it shuts down, which its supervisor detects.
        "trap 'echo \"deepvm: line $LINENO of the user data failed, this machine ends\"; shutdown -h +1' ERR",
        f"mkdir -p {SETTINGS} {FOLDER}/script",
        _file(f"{SETTINGS}/token", token, plain=masked),
        _file(f"{SETTINGS}/environment", _environment(spec, masked=masked).encode(), plain=masked),
        _file(script_path(spec), script),
    ]
    if group.hub:
        document = json.dumps(hub_job(spec, machines), indent=1)
        parts.append(_file(f"{SETTINGS}/job.json", document.encode(), plain=masked))
    parts += [*_install(group, package), *_address(), *_services(group, split_address(spec.hub)[1], hub, name)]
    text = "\n".join(parts) + "\n"
    if not masked and len(text.encode()) > MOST_BYTES:
        raise UsageError(
            f"{spec.script} has {len(script)} bytes, and the user data with it {len(text.encode())} of {MOST_BYTES} "
            "that EC2 takes: move code into a package, and install it with --set package=…"
        )
    return text


def _ending(ends_at_s: float | None) -> list[str]:
    if ends_at_s is None:
        return []
    return [
        f"left_s=$(( {int(ends_at_s)} - $(date +%s) ))",
        'shutdown -h "+$(( left_s > 60 ? left_s / 60 : 0 ))" "the spending cap of this run is reached"',
    ]


def _environment(spec: RunSpec, *, masked: bool) -> str:
    """Return the run's environment in the form of systemd's environment files."""
    lines = []
    for name, value in spec.env.items():
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"{name!r} is not a valid name of an environment variable")
        if not value.isprintable():
            raise UsageError(f"{name} has control characters, which cannot be passed to EC2: use printable text")
        quoted = re.sub(r'(["\\`$])', r"\\\1", MASK if masked else value)
        lines.append(f'{name}="{quoted}"\n')
    return "".join(lines)


def _file(path: str, content: bytes, *, plain: bool = False) -> str:
    quoted = shlex.quote(path)
    if plain:  # for a dry run
        return f"cat > {quoted} <<'DEEPVM'\n{content.decode()}\nDEEPVM"
    packed = base64.b64encode(gzip.compress(content, mtime=0)).decode()  # mtime=0: the same bytes each time
    return f"base64 -d <<'DEEPVM' | gunzip > {quoted}\n{packed}\nDEEPVM"


def _install(group: Ec2Group, package: str) -> list[str]:
    wheels = f" --index-url {CPU_WHEELS}" if group.role == "memory" else ""
    return [
        "export DEBIAN_FRONTEND=noninteractive",
        f"python3 -m venv {VENV} || {{ apt-get -q update; apt-get -qy install python3-venv; python3 -m venv {VENV}; }}",
        f"{VENV}/bin/python -m pip install --quiet{wheels} {shlex.quote(TORCH)}",
        f"{VENV}/bin/python -m pip install --quiet {shlex.quote(package)}",
    ]


def _address() -> list[str]:
    """Read this machine's address from the instance metadata."""
    metadata = "http://169.254.169.254/latest"
    return [
        f'session=$(curl -sf -m 5 --retry 5 -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" {metadata}/api/token)',
        f'address=$(curl -sf -m 5 --retry 5 -H "X-aws-ec2-metadata-token: $session" {metadata}/meta-data/local-ipv4)',
    ]


def _services(group: Ec2Group, port: int, hub: str | None, name: str) -> list[str]:
    common = f"--token-file {SETTINGS}/token --folder {FOLDER}"
    parts = []
    if group.hub:
        parts.append(_unit("hub", f"deepvm.runtime.hub --listen $address:{port} --job {SETTINGS}/job.json {common}"))
    machine = f"deepvm.runtime.agent --hub {hub}:{port} --name {name} {common} --address $address --notices aws"
    parts.append(_unit("machine", machine))
    units = "deepvm-hub deepvm-machine" if group.hub else "deepvm-machine"
    return [*parts, "systemctl daemon-reload", f"systemctl start {units}"]


def _unit(name: str, module: str) -> str:
    return f"""cat > /etc/systemd/system/deepvm-{name}.service <<DEEPVM
[Unit]
Description=deepvm {name}
StartLimitIntervalSec=600
StartLimitBurst=5
[Service]
EnvironmentFile={SETTINGS}/environment
ExecStart={VENV}/bin/python -m {module}
WorkingDirectory={FOLDER}
Restart=on-failure
RestartSec=5
KillSignal=SIGTERM
TimeoutStopSec=60
DEEPVM"""


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {path}: {error.strerror or error}") from None
