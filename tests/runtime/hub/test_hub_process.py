"""``python -m deepvm.runtime.hub``: what it says of a file that is not a job."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepvm.runtime.hub.__main__ import main


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "KeyError: 'machines'"),
        ('{"machines": [{"name": "worker/0"}]}', "TypeError"),
        ('{"machines": 3}', "TypeError"),
        ('{"machines": []}', "not a job file of deepvm run"),
        ("[]", "not a job file of deepvm run"),
    ],
)
def test_a_file_that_is_not_a_job_is_named_in_one_sentence_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    job, token = tmp_path / "job.json", tmp_path / "token"
    job.write_text(text)
    token.touch(mode=0o600)
    words = ["--listen", "127.0.0.1:0", "--job", job, "--token-file", token, "--folder", tmp_path / "hub"]
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"deepvm: {job}")
    assert "not a job file of deepvm run (" in said
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "hub").exists()
