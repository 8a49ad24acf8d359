"""Every command that the README and the documents show works as they write it."""

from __future__ import annotations

import argparse
import gzip
import logging
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer.main

from deepvm.catalog import library
from deepvm.catalog.sources import skypilot
from deepvm.cli.app import COMMANDS, make_app, run
from deepvm.fetch import command as fetch_command
from tests.support import ROOT
from tests.support.simulate.markets import write_traces

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("deepvm", "deepvm-fetch", "python", "make")
# What these do needs machines, a training script or a shell of one's own: their words are parsed and checked, no more.
PARSED = ("run", "runs", "calibrate", "memory-node", "checkpoint", "--install-completion")
VMS = (
    b"InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone\n"
    b"g4dn.xlarge,T4,1,4,16,,0.526,0.2,us-east-1,use1-az1\n"
    b"c5.xlarge,,,4,8,,0.17,0.07,us-east-1,use1-az1\n"
)
GOOGLES = (
    b"InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone\n"
    b"g2-standard-4,,,4,16,,0.15,0.06,us-east1,us-east1-b\n"
    b",L4,1,,,,0.56,0.22,us-east1,us-east1-b\n"
    b"e2-standard-4,,,4,16,,0.13,0.05,us-east1,us-east1-b\n"
)

PRICES = (
    b"cloud,type,place,market,date,usd_per_h\n"
    b"aws,p3.2xlarge,use1-az1,spot,2025-10-03,0.9183\n"
    b"aws,p3.2xlarge,us-east-1,ondemand,2025-09-01,3.06\n"
)


def commands_of(text: str) -> Iterator[str]:
    """What a reader would type: lines of code blocks, after a prompt if there is one, and code within sentences."""
    for language, block, inline in re.findall(r"(?sm)^```(\w*)\n(.*?)^```|`([^`\n]+)`", text):
        if inline:
            found = [inline] if " " in inline else []
        elif language in ("", "sh", "bash", "console"):
            lines = block.replace("\\\n", " ").splitlines()
            prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            found = prompted or [line for line in lines if "──" not in line]  # a drawing
        else:
            found = []
        yield from (line for line in found if line.split(" ")[0] in PROGRAMS)


def leaf_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words call, and the words that are left for it."""
    command = typer.main.get_command(make_app(list(COMMANDS)))
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check_words(words: list[str]) -> str | None:
    """Why a command line cannot be parsed, or None. Nothing is called."""
    command, rest = leaf_of(words)
    if not rest:
        return None if words and command.name else "no such command"  # a command that a sentence names
    if getattr(command, "commands", None) and not rest[0].startswith("-"):
        return f"{rest[0]!r} is no command"
    try:
        command.make_context("deepvm", rest, resilient_parsing="--install-completion" in rest)
    except Exception as error:
        return str(error)
    return None


def check_other_program(program: str, words: list[str]) -> str | None:
    if program == "deepvm-fetch":
        return _parses(fetch_command._parser(), words)
    if program == "python" and words[:2] == ["-m", "deepvm.runtime.launch"]:
        pytest.importorskip("torch")
        from deepvm.runtime import launch

        return _parses(launch._parser(), words[2:])
    return None  # make has tests of its own; a plain script is the user's


def _parses(parser: argparse.ArgumentParser, words: list[str]) -> str | None:
    if not words:
        return None  # a sentence names the program
    try:
        parser.parse_args(words)
    except SystemExit as end:
        return f"exit code {end.code}" if end.code else None
    return None


def words_of(line: str) -> list[str]:
    return shlex.split(line.split(" & ")[0], comments=True)


class Vms(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = GOOGLES if "/gcp/" in self.path else VMS
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def skypilots_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vms)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setattr(skypilot, "URL", f"http://127.0.0.1:{server.server_address[1]}/{{provider}}/vms.csv")
    yield
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield
    server.stop()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("aws", "skypilots_file")
def test_every_command_of_the_readme_works_in_the_order_of_reading(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [words for line in commands_of(DOCUMENTS[0].read_text()) if (words := words_of(line))[0] == "deepvm"]
    assert len(found) >= 15
    write_traces(scratch / "traces")
    (scratch / "prices.csv.gz").write_bytes(gzip.compress(PRICES))
    failed = {}
    for _, *words in found:
        if words[-1] == "...":  # and whatever else the reader wants
            words[-1:] = ["--budget", "3"]
        if words[0] in PARSED or len(words) == 1:
            problem = check_words(words)
        else:
            code = run(words)
            shown = capsys.readouterr()
            problem = f"exit code {code}: {shown.err[-300:]}" if code else None
        if problem:
            failed[" ".join(words)] = problem
    assert failed == {}
    assert {"skypilot-aws", "aws-us-east-1"} <= set(library.names())
    assert (scratch / "sweep.svg").is_file()
    assert (scratch / "paper").is_dir()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_a_document_shows_can_be_parsed(document: Path) -> None:
    failed = {}
    for line in commands_of(document.read_text()):
        program, *words = words_of(line)
        if words and words[-1] == "...":
            words[-1:] = ["--budget", "3"]
        problem = check_words(words) if program == "deepvm" else check_other_program(program, words)
        if problem:
            failed[line] = problem
    assert failed == {}


@pytest.mark.parametrize(
    "line", ["deepvm plna --budget 3", "deepvm plan --bugdet 3", "deepvm catalog upd --source aws"]
)
def test_a_command_with_a_slip_would_be_found(line: str) -> None:
    assert list(commands_of(f"So do this: `{line}`.")) == [line]
    assert list(commands_of(f"```\n$ {line}\nout\n```\n")) == [line]
    assert check_words(words_of(line)[1:])
