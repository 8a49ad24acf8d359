"""``deepvm checkpoint`` on what a stranger made: a sentence for each bad one, and nothing steers the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from deepvm.cli.app import run
from deepvm.cli.render import print_json
from deepvm.errors import Corrupt, printable
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.store.files.store import FileStore
from tests.support.store.checkpoints import manifest_of, put, safetensors_payload, save

NASTY = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202eevil[red]x[/red][/][link=http://e.vil]y[/link]"


def odd_payload() -> bytes:
    """A safetensors file whose names steer a terminal."""
    header = {NASTY: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "__metadata__": {NASTY: NASTY}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"1234"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Good checkpoints, steps 1 and 9, and bad ones between them."""
    with contextlib.closing(FileStore(tmp_path)) as store:
        save(store, safetensors_payload(), "resnet", 1)
        for step in range(2, 9):
            save(store, safetensors_payload(), "resnet", step)
        data = odd_payload()
        manifest = manifest_of(data, "resnet", 9)
        writer = store.writer("resnet", 9, size_bytes=len(data), chunk_bytes=manifest.chunk_bytes)
        put(writer, data, manifest, range(len(manifest.digests)))
        writer.publish(dataclasses.replace(manifest, facts={NASTY: [NASTY], "x": NASTY}))
    good = json.loads((tmp_path / "resnet" / "step-000000000002.json").read_text())
    bad: list[Any] = [
        "[" * 100_000,
        json.dumps({**good, "step": 3, "format": NASTY}),
        json.dumps({**good, "step": 4, "created_s": 1e300}),
        json.dumps({**good, "step": 5, "facts": [NASTY]}),
        json.dumps({**good, "step": 6, "world_size": NASTY}),
        json.dumps({**good, "run": NASTY}),
        json.dumps({**good, "step": 8, "size_bytes": float(good["size_bytes"])}),
    ]
    for step, text in enumerate(bad, start=2):
        (tmp_path / "resnet" / f"step-{step:012d}.json").write_text(text)
    (tmp_path / NASTY.replace("/", "")).mkdir()
    (tmp_path / "resnet" / "step-٣٣٣٣٣٣٣٣٣٣٣٣.json").touch()  # digits, but not those of a step
    (tmp_path / "resnet" / f"step-{'9' * 200}.json").touch()
    (tmp_path / "resnet" / f"step-{'9' * 200}.safetensors").touch()
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = run(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert all(c.isprintable() or c == "\n" for c in text), ascii(text)
    assert "Traceback" not in text
    return code, text


def test_ls_lists_the_good_ones_and_a_sentence_for_each_bad_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = shown(capsys, "ls", root)
    assert code == 0
    code, text = shown(capsys, "ls", root, "--json")
    found = {row["step"]: "problem" in row for row in json.loads(text)["checkpoints"]}
    assert found == {1: False, **dict.fromkeys(range(2, 9), True), 9: False}


def test_show_prints_names_as_they_are_spelled(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "show", root)
    assert code == 0
    assert r"\x1b[2J" in text
    assert "[red]x[/red]" in text
    code, text = shown(capsys, "show", root, "--json")
    assert json.loads(text)["tensors"][0]["name"] == NASTY


@pytest.mark.parametrize("step", range(2, 9))
def test_commands_on_a_bad_one_say_one_sentence(root: Path, capsys: pytest.CaptureFixture[str], step: int) -> None:
    chosen = ("--run", "resnet", "--step", step)
    for words in (("show", root), ("export", root, root / "out"), ("pull", root, root / "there")):
        code, text = shown(capsys, *words, *chosen)
        assert code == 1
        assert text.startswith("deepvm: ")
        assert text.count("\n") == 1
    assert shown(capsys, "verify", root, *chosen)[0] == 1
    assert shown(capsys, "rm", root, *chosen, "--yes")[0] == 0


def test_verify_goes_through_all_of_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = shown(capsys, "verify", root, "--all")
    assert code == 1
    _, text = shown(capsys, "verify", root, "--all", "--json")
    assert [row["step"] for row in json.loads(text[: text.rindex("}") + 1])["checkpoints"] if row["good"]] == [1, 9]


def test_errors_show_control_characters_as_escapes() -> None:
    assert str(Corrupt("a\x1b[2Jb\x9b\u202e")) == r"a\x1b[2Jb\x9b\u202e"
    assert printable("two\nlines, é and 漢") == "two\nlines, é and 漢"


def test_the_status_of_a_hostile_node_is_shown_and_steers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A node that answers STATUS with anything: numbers that are text, names that are escapes, markup."""
    status = {
        "used_bytes": NASTY,
        "uptime_s": [NASTY],
        "runs": None,
        NASTY: True,
        "bytes_in": 2**63 - 1,
        "idle_s": -1e300,
    }
    hello = {"version": frames.VERSION, "block_bytes": 2**16, "nonce": "0" * 64, "token": False}
    words = frames.encode(Kind.HELLO, 0, hello) + frames.encode(Kind.OK, 1, {}) + frames.encode(Kind.OK, 2, status)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(10)
                sock.sendall(words)
                while sock.recv(65536):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        code = run(["memory-node", "--status", f"127.0.0.1:{listener.getsockname()[1]}"])
        thread.join(10)
    text = "".join(capsys.readouterr())
    assert code == 0
    assert all(c.isprintable() or c == "\n" for c in text), ascii(text)
    assert "[red]" in text


def test_numbers_that_are_not_finite_are_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1.5, float("inf"), (float("nan"), {"b": -float("inf")})]})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None, [None, {"b": None}]]}
