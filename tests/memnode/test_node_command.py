"""``deepvm memory-node`` as users start, ask and stop it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from deepvm.cli import app
from deepvm.errors import StoreError, StoreUnavailable
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.store.files.store import FileStore
from tests.support.memnode.client import BLOCK, DEEPVM, Client, NodeProcess, chunks_of, content, manifest_of
from tests.support.waiting import wait_until

SIZE = 3 * BLOCK + 100


def run(*words: str, **fields: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([DEEPVM, "memory-node", *words], capture_output=True, text=True, timeout=30, **fields)


def test_a_node_starts_tells_where_it_is_and_stops_on_sigterm(tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node:
        first = node.events()[0]
        assert first["event"] == "listening"
        assert first["address"] == node.address
        with Client(node.address, "run") as client:
            client.save(1, content(1, SIZE))
            told = run("--status", node.address, "--json")
            assert (told.returncode, told.stderr) == (0, "")
            status = json.loads(told.stdout)
            assert {**status, "checkpoints": 1, "used_bytes": 4 * BLOCK, "runs": 1, "capacity_bytes": 2**24} == status
            assert "checkpoints" in run("--status", node.address).stdout
            node.process.send_signal(signal.SIGTERM)
            assert node.process.wait(10) == 0
        assert node.events()[-1]["event"] == "stopped"
        assert not node.ready.exists()
        assert all({"time", "level", "event"} <= set(event) for event in node.events())


def test_stopping_lets_an_upload_finish_and_writes_it_on(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    data = content(1, SIZE)
    with NodeProcess(tmp_path, "--spill", str(spill)) as node, Client(node.address, "run") as client:
        client.begin(1, SIZE)
        client.put(1, 0, chunks_of(data)[0])
        node.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.status()["stopping"])
        with pytest.raises(StoreUnavailable, match="no new upload begins"):
            client.begin(2, SIZE)
        with pytest.raises(StoreError):
            Client(node.address)
        for number in (1, 2, 3):
            client.put(1, number, chunks_of(data)[number])
        client.publish(manifest_of(data, "run", 1))
        assert node.process.wait(10) == 0
    assert FileStore(spill).steps("run") == [1]
    with NodeProcess(tmp_path, "--spill", str(spill)) as node:
        started = [event["spilled_checkpoints"] for event in node.events() if event["event"] == "listening"]
        assert started == [0, 1]


def test_an_upload_that_does_not_finish_is_dropped_at_the_deadline(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, "--stop-within", "300ms") as node, Client(node.address, "run") as client:
        client.begin(1, SIZE)
        started = time.monotonic()
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(10) == 0
        assert 0.25 < time.monotonic() - started < 5


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, "--stop-within", "60s") as node, Client(node.address, "run") as client:
        client.begin(1, SIZE)
        node.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.status()["stopping"])
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(10) == 0


def test_metrics_and_health_are_served(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, "--metrics", "0") as node, Client(node.address, "run") as client:
        client.save(1, content(1, SIZE))
        address = node.events()[0]["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        samples = dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))
        assert samples["deepvm_memory_node_saves_total"] == "1"
        assert samples["deepvm_memory_node_used_bytes"] == str(4 * BLOCK)
        for name in samples:
            assert f"# HELP {name} " in text
            assert f"# TYPE {name} " in text
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=5) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
        with pytest.raises(HTTPError, match="404") as missing:
            urllib.request.urlopen(f"http://{address}/secrets", timeout=5)
        missing.value.close()


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o600)
    with NodeProcess(tmp_path, DEEPVM_TOKEN="secret") as node:
        assert run("--status", node.address, "--token-file", str(path)).returncode == 0
        denied = run("--status", node.address, "--json")
        assert denied.returncode == 1
        assert "asks for a token" in json.loads(denied.stdout)["error"]["message"]
        assert "secret" not in Path(f"/proc/{node.process.pid}/cmdline").read_text()
        assert "secret" not in node.log.read_text()


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ([], 2, "needs --listen HOST:PORT and --capacity SIZE"),
        (["--listen", "127.0.0.1:0", "--capacity", "lots"], 2, "is not a size"),
        (["--listen", "127.0.0.1:0", "--capacity", "900TB"], 2, "more than the"),
        (["--listen", "0.0.0.0:0", "--capacity", "16MB"], 2, "without a token the node listens on loopback only"),
        (["--listen", "127.0.0.1:0", "--capacity", "16MB", "--spill", "/no/such"], 2, "does not exist"),
        (["--listen", "127.0.0.1:0", "--capacity", "16MB", "--durable", "ftp://x"], 2, "ftp"),
        (["--status", "127.0.0.1:1"], 1, "cannot be reached: Connection refused"),
    ],
)
def test_what_cannot_be_done_is_reported_in_one_sentence(
    words: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["memory-node", *words]) == code
    told = capsys.readouterr().err
    assert sentence in told
    assert "Traceback" not in told
    assert len(told.strip().splitlines()) == 1


def test_a_port_in_use_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert app.run(["memory-node", "--listen", address, "--capacity", "16MB"]) == 1
    told = capsys.readouterr().err
    assert "cannot listen on" in told
    assert "Address already in use" in told


@pytest.mark.chaos
def test_the_wire_s_answers_fit_into_its_limits(tmp_path: Path) -> None:
    """Many runs with long names, many steps: the lists stay within a frame's meta."""
    with NodeProcess(tmp_path, capacity="128MiB") as node:
        for number in range(700):
            with Client(node.address, f"{number:0100}") as client:
                client.save(2**62, b"x")
        with Client(node.address) as client:
            answer = client.ask(Kind.RUNS)[1]
        assert len(answer["runs"]) + answer["more"] == 700
        assert len(json.dumps(answer)) < frames.MOST_META_BYTES
