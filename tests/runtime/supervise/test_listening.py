"""What a run here listens on: loopback, and nothing that another machine could reach."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from deepvm.errors import DeepvmError
from tests.support.runtime.machines import MARK
from tests.support.runtime.whole_runs import Running, running, words_for

pytestmark = pytest.mark.timeout(300)
LISTEN = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def listening() -> dict[str, str]:
    """Inode of every socket that listens on this machine -> its address, as the kernel writes it."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTEN:
                found[fields[9]] = fields[1].partition(":")[0]
    return found


def listeners_of(run: Running) -> set[tuple[str, str]]:
    """Where processes of the run listen, and their command lines."""
    inodes, found = listening(), set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended
            if f"{MARK}={run.mark}".encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed
                    inode = os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]")
                    if inode in inodes:
                        found.add((inodes[inode], command))
    return found


def test_a_local_run_listens_on_loopback_only(tmp_path: Path) -> None:
    words = words_for(tmp_path, "run", 400, "--step-s", "0.05", workers=1)
    with running(tmp_path, words, name="run") as run:
        run.until_step(3)
        found = listeners_of(run)
        run.interrupt()
        run.end()
    for part in ("deepvm run", "deepvm.runtime.agent", "memory-node"):  # hub; store and gloo; checkpoints
        assert any(part in command for _, command in found), found
    assert [one for one in found if one[0] not in LOOPBACK] == []


@pytest.mark.parametrize(("torch_version", "libuv"), [((2, 4), False), ((2, 8), True)])
def test_the_store_of_a_round_listens_at_the_address_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, torch_version: tuple[int, int], libuv: bool
) -> None:
    from deepvm.runtime.agent import rendezvous

    monkeypatch.setattr(rendezvous, "_TORCH", torch_version)
    before = set(listening())
    store = rendezvous.listening_store("127.0.0.2")
    opened = [address for inode, address in listening().items() if inode not in before and address == "0200007F"]
    assert opened == ["0200007F"]
    assert store.libuvBackend is libuv
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_machine_that_has_not_the_address_it_is_known_by_says_so() -> None:
    from deepvm.runtime.agent.rendezvous import listening_store

    with pytest.raises(DeepvmError, match=r"cannot listen on 203\.0\.113\.7:0: Cannot assign requested address"):
        listening_store("203.0.113.7")
