"""A real S3 server on loopback (SeaweedFS), for as long as a test needs it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_S = 30.0
ACCESS, SECRET = "an-access-key", "a-secret-key-that-no-message-may-show"
ADMIN_ACCESS, ADMIN_SECRET = "an-admins-key", "an-admins-secret"  # who may make buckets


def weed_binary() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass(frozen=True, kw_only=True)
class S3Server:
    endpoint: str
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def kill(self) -> None:
        if self.process.poll() is None:  # else its number may belong to another test's process
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Started on free ports; answers when this returns, and is gone afterwards."""
    weed = weed_binary()
    assert weed is not None
    directory.mkdir(parents=True)
    tester, admin = (
        {"name": name, "credentials": [{"accessKey": access, "secretKey": secret}], "actions": actions}
        for name, access, secret, actions in (
            ("tester", ACCESS, SECRET, ["Read", "List", "Write"]),
            ("admin", ADMIN_ACCESS, ADMIN_SECRET, ["Admin", "Read", "List", "Write"]),
        )
    )
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [tester, admin]}))
    taken = _free_ports(9)
    ports = iter(taken)
    command = [
        weed,
        "-logtostderr=true",
        "server",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        f"-s3.config={config}",
    ]
    command += ["-volume.max=5000", "-master.volumeSizeLimitMB=512", "-master.telemetry=false"]
    for option in ("master.port", "volume.port", "filer.port", "master.port.grpc", "volume.port.grpc"):
        command.append(f"-{option}={next(ports)}")
    command += [f"-filer.port.grpc={next(ports)}", f"-s3.port.grpc={next(ports)}", f"-debug.port={next(ports)}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    port = next(ports)
    log = (directory / "log").open("wb")
    process = subprocess.Popen(
        [*command, f"-s3.port={port}"],
        stdout=log,
        stderr=log,
        start_new_session=True,
        cwd=directory,
        preexec_fn=_die_with_parent,
    )
    server = S3Server(endpoint=f"http://127.0.0.1:{port}", process=process)
    try:
        _wait_until_it_answers(server, directory / "log")
        yield server
    finally:
        server.kill()
        log.close()
        for port in taken:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # it makes them there, whatever it is told
                left.unlink()


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """So that a killed test run leaves no server behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_until_it_answers(server: S3Server, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            urllib.request.urlopen(server.endpoint, timeout=1).close()  # noqa: S310 - our own server
            return
        except urllib.error.HTTPError as answer:  # refusing the nameless is an answer
            answer.close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the S3 server did not start: {log.read_text(errors='replace')[-2000:]}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
