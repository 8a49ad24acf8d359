"""``deepvm checkpoint`` as its users meet it, on a directory."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepvm.cli.app import run
from deepvm.cli.replay import _build
from deepvm.errors import UsageError
from deepvm.store.files.store import FileStore
from tests.support.store.checkpoints import payload, read, safetensors_payload, save
from tests.support.store.places import FilePlace


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    root = tmp_path / "kept"
    with contextlib.closing(FileStore(root)) as store:
        for step in (5, 10):
            save(store, safetensors_payload(), "resnet", step)
    return root


Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command with --json; its exit code and its document."""

    def asked(*words: object) -> tuple[int, Any]:
        code = run(["checkpoint", *map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return asked


def test_ls_lists_every_checkpoint(kept: Path, ask: Ask) -> None:
    code, document = ask("ls", kept)
    assert code == 0
    assert [(c["run"], c["step"]) for c in document["checkpoints"]] == [("resnet", 5), ("resnet", 10)]
    assert document["checkpoints"][0]["size_bytes"] == len(safetensors_payload())
    assert ask("ls", kept, "--run", "other") == (0, {"url": str(kept), "checkpoints": []})


def test_show_tells_the_tensors_of_the_newest(kept: Path, ask: Ask) -> None:
    code, document = ask("show", f"file://{kept}")
    assert (code, document["step"]) == (0, 10)
    tensors = {t["name"]: (t["dtype"], t["shape"], t["size_bytes"]) for t in document["tensors"]}
    assert tensors["model.weight"] == ("F32", [300, 257], 300 * 257 * 4)
    assert tensors["model.bias"] == ("BF16", [257], 514)
    assert tensors["empty"] == ("F32", [0, 3], 0)


def test_tables_are_for_people(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "ls", str(kept)]) == 0
    assert "resnet" in capsys.readouterr().out
    assert run(["checkpoint", "show", str(kept)]) == 0
    assert "300 × 257" in capsys.readouterr().out
    assert run(["checkpoint", "verify", str(kept)]) == 0
    assert "good resnet step 10" in capsys.readouterr().out
    assert run(["checkpoint", "ls", str(kept / "nothing")]) == 0
    assert "no checkpoints" in capsys.readouterr().out


def test_verify_finds_the_bad_chunk_and_says_what_to_do(
    kept: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = ask("verify", kept, "--all")
    assert (code, document["good"], len(document["checkpoints"])) == (0, True, 2)
    FilePlace(kept).flip("resnet", 5, 2 * 2**16 + 9)
    code, document = ask("verify", kept, "--all")
    assert (code, document["good"]) == (1, False)
    assert [c["good"] for c in document["checkpoints"]] == [False, True]
    assert [b["chunk"] for b in document["checkpoints"][0]["chunks_bad"]] == [2]
    assert ask("verify", kept)[0] == 0  # the newest is good
    assert run(["checkpoint", "verify", str(kept), "--step", "5"]) == 1
    out = capsys.readouterr().out
    assert "chunk 2 at byte 131072" in out
    assert f"deepvm checkpoint rm {kept} --run resnet --step 5" in out


def test_verify_tells_a_manifest_that_cannot_be_read(kept: Path, ask: Ask) -> None:
    (kept / "resnet" / "step-000000000005.json").write_text("{")
    code, document = ask("verify", kept, "--all")
    assert (code, document["checkpoints"][0]["good"]) == (1, False)
    assert "manifest" in document["checkpoints"][0]["problem"]
    assert "problem" in ask("ls", kept)[1]["checkpoints"][0]


def test_bytes_that_are_no_safetensors_file_are_bad(tmp_path: Path, ask: Ask) -> None:
    save(FileStore(tmp_path), payload(1000))
    code, document = ask("verify", tmp_path)
    assert (code, document["checkpoints"][0]["chunks_bad"]) == (1, [])
    assert "safetensors" in document["checkpoints"][0]["problem"]


def test_export_writes_a_plain_file(kept: Path, tmp_path: Path, ask: Ask) -> None:
    from safetensors.torch import load_file

    file = tmp_path / "model.safetensors"
    code, document = ask("export", kept, "--run", "resnet", "--step", 5, file)
    assert (code, document["step"]) == (0, 5)
    assert load_file(file)["model.weight"].shape == (300, 257)


def test_pull_copies_the_newest(kept: Path, tmp_path: Path, ask: Ask) -> None:
    code, document = ask("pull", kept, tmp_path / "other")
    assert (code, document["step"]) == (0, 10)
    assert read(FileStore(tmp_path / "other"), "resnet", 10) == safetensors_payload()


def test_rm_asks_unless_confirmed_by_an_option(kept: Path, ask: Ask) -> None:
    code, document = ask("rm", kept, "--run", "resnet", "--step", 5)
    assert (code, "--yes" in document["error"]["message"]) == (2, True)
    code, document = ask("rm", kept, "--run", "resnet", "--step", 5, "--yes")
    assert (code, FileStore(kept).steps("resnet")) == (0, [10])
    assert ask("rm", kept, "--run", "resnet", "--step", 5, "--yes")[0] == 1


def test_questions_without_an_answer_are_reported_in_a_sentence(kept: Path, ask: Ask) -> None:
    save(FileStore(kept), payload(10), "second", 1)
    for words, code, text in (
        (["show", kept], 2, "choose one with --run (resnet, second)"),
        (["show", kept, "--run", "resnet", "--step", 7], 1, "no step 7"),
        (["show", kept / "empty"], 1, "no checkpoints"),
        (["ls", "ftp://somewhere"], 2, "memory://"),
        (["ls", kept, "--token-file", kept / "none"], 2, "token file"),
        (["verify", kept, "--all", "--step", 5], 2, "--all"),
    ):
        found, document = ask(*words)
        assert (found, text in document["error"]["message"]) == (code, True), document


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("train.py", "--replay 'train.py' does not name a function in a file: write it as train.py:function"),
        ("train.py:", "does not name a function in a file"),
        (":build", "does not name a function in a file"),
        ("missing.py:build", "does not name a function in a file"),
        ("train.txt:build", "train.txt is not a Python file: write it as train.py:function"),
        ("train.py:nothing", "train.py has no function nothing: write it"),
        ("train.py:value", "train.py has no function value"),
        ("train.py:three", "three in train.py returned tuple: write it"),
        ("train.py:nested", "nested in train.py returned list"),
        ("train.py:wrong", "wrong in train.py returned tuple"),
        ("train.py:still", "still in train.py returned tuple"),
    ],
)
def test_a_replay_needs_a_function_that_returns_state_and_step(
    spec: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("train.py", "train.txt"):
        Path(name).write_text(
            "value = 7\nstep = lambda: None\ndef build(): return {'a': 1}, step\ndef three(): return {}, step, 1\n"
            "def nested(): return [{}, step]\ndef wrong(): return [], step\ndef still(): return {}, 3\n"
        )
    with pytest.raises(UsageError) as refused:
        _build(spec)
    assert told in str(refused.value)
    state, step = _build("train.py:build")
    assert (state, step()) == ({"a": 1}, None)
    assert sys.path[0] == str(tmp_path)
    monkeypatch.delitem(sys.modules, "train")
