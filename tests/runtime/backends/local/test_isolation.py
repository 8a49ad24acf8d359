"""Machines in networks of their own: they find each other and the hub, as fast as they may, and leave nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.cli.app import run as deepvm_command
from deepvm.errors import DeepvmError, UsageError
from deepvm.runtime.backends.local import network
from deepvm.runtime.backends.local.backend import LocalBackend
from deepvm.runtime.backends.local.network import Network, sweep
from deepvm.runtime.cluster import Machine
from deepvm.runtime.supervise.run_folder import RunFolder
from tests.support import ROOT
from tests.support.runtime.machines import PATIENCE_S, as_tuples, changes, job, machine, marked, python
from tests.support.waiting import wait_until

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

TALK = """
import os, socket, sys
name, address, (host, port) = *sys.argv[1:], os.environ["HUB"].split(":")
hub = socket.create_connection((host, int(port)), 20)
with socket.create_server((address, 7070)) as server:
    server.settimeout(20)
    hub.sendall(name.encode() + b"\\n")
    peer = hub.recv(100).decode().strip()
    if peer == "serve":
        accepted, _ = server.accept()
        accepted.sendall(bytes(int(os.environ["BYTES"])))
        accepted.close()
    else:
        with socket.create_connection((peer, 7070), 20) as served:
            count = 0
            while got := served.recv(2**16):
                count += len(got)
        hub.sendall(f"{count}\\n".encode())
    hub.recv(1)
"""
AMOUNT = 300_000
RATE = 8_000_000  # bit/s


def ours() -> set[str]:
    """Links and namespaces of this process, and of those that have ended. Others may be testing, too."""
    names = set(os.listdir("/sys/class/net"))
    if os.path.isdir("/run/netns"):
        names |= set(os.listdir("/run/netns"))
    owners = {name: int(name.split("-")[1], 36) for name in names if name.startswith("dvm-")}
    return {name for name, pid in owners.items() if pid == os.getpid() or not os.path.exists(f"/proc/{pid}")}


@pytest.fixture
def clean() -> Iterator[None]:
    before = ours()
    yield
    assert ours() <= before


def limited_bytes(bits_per_s: int) -> list[int]:
    """How many bytes went through each link of this process that is limited to this bandwidth."""
    found = json.loads(subprocess.run(["tc", "-s", "-j", "qdisc"], check=True, timeout=20, capture_output=True).stdout)
    limited = [queue for queue in found if queue["dev"] in ours() and queue["kind"] == "tbf"]
    return [queue["bytes"] for queue in limited if queue["options"]["rate"] == bits_per_s // 8]


def line(stream: socket.socket) -> str:
    got = b""
    while not got.endswith(b"\n"):
        more = stream.recv(1)
        assert more, got
        got += more
    return got.decode().strip()


@root
@pytest.mark.usefixtures("clean")
def test_machines_connect_at_the_bridge_and_their_links_have_the_given_bandwidth(tmp_path: Path) -> None:
    given = job(tmp_path)
    backend = LocalBackend(
        given,
        network=Network.create(RATE),
        command=lambda m: [sys.executable, "-I", "-S", "-c", TALK, m.name, backend.address_of(m.name)],
    )
    try:
        with socket.create_server((backend.hub_address, 0)) as hub:
            hub.settimeout(PATIENCE_S)
            host, port = hub.getsockname()
            env = {**given.env, "HUB": f"{host}:{port}", "BYTES": str(AMOUNT)}
            backend.spec = replace(given, hub=f"{host}:{port}", env=env)
            backend.up([machine("worker/0"), machine("worker/1")])
            talking = {}
            for _ in range(2):
                accepted, (address, _) = hub.accept()
                accepted.settimeout(PATIENCE_S)
                talking[name := line(accepted)] = accepted
                assert address == backend.address_of(name) != backend.hub_address
            assert {change.address for change in changes(backend, 2)} == set(map(backend.address_of, talking))
            talking["worker/0"].sendall(b"serve\n")
            talking["worker/1"].sendall(f"{backend.address_of('worker/0')}\n".encode())
            assert line(talking["worker/1"]) == str(AMOUNT)
            assert max(limited_bytes(RATE)) >= AMOUNT
            for stream in talking.values():
                stream.close()
            assert [change.why for change in changes(backend, 2)] == ["ended", "ended"]
    finally:
        backend.down(within_s=0)
    assert marked(given) == []


@root
@pytest.mark.usefixtures("clean")
def test_a_machine_that_is_replaced_has_its_address_again_and_knows_its_interface(tmp_path: Path) -> None:
    code = "import os, socket; print(os.environ['GLOO_SOCKET_IFNAME'], *(n for _, n in socket.if_nameindex()))"
    backend = LocalBackend(job(tmp_path), network=Network.create(), command=python(code))
    try:
        addresses = []
        for end in (lambda: None, lambda: backend.down(["worker/1"]), backend.down, lambda: None):
            backend.up([machine("worker/1")])
            up, down = changes(backend, 2)
            assert as_tuples([down]) == [("worker/1", "down", "ended", 0)]
            addresses.append(up.address)
            end()
        assert len(set(addresses)) == 1
        log = (backend.folder_of("worker/1") / "log.txt").read_text(encoding="utf-8")
        assert log == "eth0 lo eth0\n" * 4
    finally:
        backend.down()


@root
@pytest.mark.usefixtures("clean")
def test_two_clusters_at_once_do_not_meet(tmp_path: Path) -> None:
    first = LocalBackend(job(tmp_path), network=Network.create())
    second = LocalBackend(job(tmp_path), network=Network.create())
    try:
        assert first.hub_address.rpartition(".")[0] != second.hub_address.rpartition(".")[0]
        second.down()
        with socket.create_server((first.hub_address, 0)):
            pass  # its own bridge is still there
    finally:
        first.down()
        second.down()


def kill_a_run(folder: Path) -> None:
    """A run with one isolated machine, whose supervisor is killed."""
    code = f"""
    import os, signal
    from pathlib import Path
    from tests.support.runtime.machines import job, machine, python
    from deepvm.runtime.backends.local.network import Network
    from deepvm.runtime.backends.local.backend import LocalBackend
    command = python("import time; time.sleep(600)")
    backend = LocalBackend(job(Path({str(folder)!r})), network=Network.create(), command=command)
    backend.up([machine("worker/0")])
    os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=60, cwd=ROOT)


@root
@pytest.mark.usefixtures("clean")
def test_what_a_killed_run_left_is_removed_by_the_next_and_nothing_else_is(tmp_path: Path) -> None:
    before = ours()
    kill_a_run(tmp_path)
    assert len(ours() - before) == 2  # a bridge; and a link and a namespace of the same name
    backend = LocalBackend(job(tmp_path), network=Network.create())
    try:
        mine = ours() - before
        assert len(mine) == 1
        sweep()
        assert ours() - before == mine
    finally:
        backend.down()


@root
@pytest.mark.usefixtures("clean")
def test_down_removes_what_a_killed_run_left_here_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPVM_RUNS", str(tmp_path / "runs"))
    RunFolder.create("r1", {"on": "local"})
    before = ours()
    kill_a_run(tmp_path)
    left = sorted(ours() - before)
    assert len(left) == 2
    assert deepvm_command(["run", "--down", "r1"]) == 0
    assert ours() == before
    said = " ".join(capsys.readouterr().err.split())
    assert all(name in said for name in left)
    assert deepvm_command(["run", "--down", "r1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "r1", "outcome": "ended", "removed": []}


REDUCES = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.ones(1_000_000)
dist.all_reduce(numbers)
print("reduced", numbers[0].item(), flush=True)
time.sleep(600)
"""
REDUCED = re.compile(r"reduced (\S+)\n")  # a whole line


@root
@pytest.mark.chaos
@pytest.mark.usefixtures("clean")
def test_workers_of_templates_reduce_over_their_links_and_vanish_with_their_machine(tmp_path: Path) -> None:
    script = tmp_path / "reduces.py"
    script.write_text(REDUCES, encoding="utf-8")

    def command(of: Machine) -> list[str]:
        first = backend.address_of("worker/0")
        return [
            sys.executable, "-m", "deepvm.runtime.launch", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
            "--rdzv-id=isolated", f"--rdzv-endpoint={first}:29511", f"--rdzv-conf=is_host={of.name == 'worker/0'}",
            f"--local-addr={backend.address_of(of.name)}", str(script),
        ]  # fmt: skip

    given = job(tmp_path)
    backend = LocalBackend(given, network=Network.create(100_000_000), command=command)
    try:
        backend.up([machine("worker/0"), machine("worker/1")])
        for name in ("worker/0", "worker/1"):
            log = backend.folder_of(name) / "log.txt"
            wait_until(lambda log=log: REDUCED.search(log.read_text(encoding="utf-8")), "a reduction", timeout_s=90)
            assert REDUCED.findall(log.read_text(encoding="utf-8")) == ["2.0"]
        assert min(limited_bytes(100_000_000)) > 4_000_000  # a million numbers
        before = len(marked(given))
        changes(backend, 2)
        backend.preempt("worker/1", notice_s=0)
        assert as_tuples(changes(backend, 1)) == [("worker/1", "down", "preempted", -9)]
        assert len(marked(given)) == before // 2
    finally:
        backend.down(within_s=10)
    assert marked(given) == []


def test_without_root_isolation_is_refused() -> None:
    code = """
    import os
    from deepvm.errors import UsageError
    from deepvm.runtime.backends.local.network import Network
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        Network.create()
    except UsageError as error:
        print(error)
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, capture_output=True, text=True
    ).stdout
    assert said == "--isolate creates network namespaces, which only root may: run as root, or without it\n"


@root
def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="--isolate needs ip and tc: install iproute2, or run without it"):
        LocalBackend(job(tmp_path), network=Network.create())


def test_a_bandwidth_that_lets_nothing_through_is_refused() -> None:
    with pytest.raises(UsageError, match="the bandwidth is 0 bit/s: it must be at least 8000"):
        Network.create(0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("sh", "-c", "echo it is >&2; echo broken >&2; exit 3"), "failed: it is broken"),
        (("sh", "-c", "exit 3"), "returned non-zero exit status 3"),
        (("no-such-tool",), "No such file or directory: 'no-such-tool'"),
    ],
)
def test_a_tool_that_fails_is_named_with_its_own_words_or_those_of_the_system(
    words: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(DeepvmError, match="--isolate cannot create its network: `") as told:
        network._run(*words)
    assert str(told.value).endswith(reason) or f"{reason}." in str(told.value)
    assert "\n" not in str(told.value)
