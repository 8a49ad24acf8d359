"""What outlives the node: the spill directory, the durable store, and how both get there."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import AccessDenied, Corrupt, StoreUnavailable, UsageError
from deepvm.memnode import MemoryNode
from deepvm.protocol.frames import Kind
from deepvm.store.base import Manifest
from deepvm.store.files.store import FileStore
from tests.support.memnode.client import BLOCK, Client, NodeProcess, chunks_of, content, digest_of, manifest_of
from tests.support.waiting import wait_until

SIZE = 3 * BLOCK + 100


def read_file_store(store: FileStore, run: str, step: int) -> bytes:
    manifest = store.manifest(run, step)
    data = bytearray(manifest.size_bytes)
    for chunk in range(len(manifest.digests)):
        offset, length = manifest.span(chunk)
        store.read_chunk(manifest, chunk, memoryview(data)[offset : offset + length])
    return bytes(data)


def settled(client: Client) -> bool:
    status = client.status()
    return not status.get("spill_waiting") and not status.get("durable_waiting")


class SlowStore(FileStore):
    """A store that waits to be let go, or fails for as long as it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()
        self.failing = False

    def writer(self, *words: Any, **fields: Any) -> Any:
        if self.failing:
            raise StoreUnavailable("the bucket refuses")
        assert self.go.wait(20)
        return super().writer(*words, **fields)


def test_a_spilled_checkpoint_is_a_file_that_any_file_store_reads(
    start_node: Any, connect: Any, tmp_path: Path
) -> None:
    client = connect(start_node(spill=tmp_path).address, "run")
    data = content(1, SIZE)
    client.save(1, data)
    wait_until(lambda: client.steps() == {1: "spilled"})
    assert (tmp_path / "run" / "step-000000000001.safetensors").read_bytes() == data
    assert read_file_store(FileStore(tmp_path), "run", 1) == data


def test_a_restarted_node_serves_what_it_had_spilled(start_node: Any, connect: Any, tmp_path: Path) -> None:
    first = start_node(spill=tmp_path)
    client = connect(first.address, "run", session="old")
    for step in (1, 2, 3):
        client.save(step, content(step, SIZE))
        wait_until(lambda: settled(client))
    client.open_run("run", session="newer")
    first.stop()

    second = start_node(spill=tmp_path)
    with pytest.raises(AccessDenied):
        connect(second.address, "run", key="wrong", write=False)
    with pytest.raises(AccessDenied, match="newer session"):
        connect(second.address, "run", session="old")
    reader = connect(second.address, "run", write=False, both=False)
    assert reader.steps() == {2: "spilled", 3: "spilled"}
    assert [reader.read(step) for step in (2, 3)] == [content(2, SIZE), content(3, SIZE)]
    wait_until(lambda: second.arena.used == 0)
    # and unchanged chunks of it are kept, though they have to be read again
    writer = connect(second.address, "run", session="newest")
    writer.begin(4, SIZE)
    writer.keep(4, 3, {chunk: digest_of(chunks_of(content(3, SIZE))[chunk]) for chunk in range(4)})
    writer.publish(manifest_of(content(3, SIZE), "run", 4))
    assert writer.read(4) == content(3, SIZE)
    assert second.arena.used == 4


def test_keys_of_runs_are_kept_for_the_owner_only(start_node: Any, connect: Any, tmp_path: Path) -> None:
    client = connect(start_node(spill=tmp_path).address, "run", key="secret")
    client.save(1, content(1, SIZE))
    wait_until(lambda: settled(client))
    path = tmp_path / "run" / "run.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" not in path.read_text()


def test_the_spill_directory_keeps_as_many_as_configured(start_node: Any, connect: Any, tmp_path: Path) -> None:
    node = start_node(spill=tmp_path, spill_keep=3)
    client = connect(node.address, "run")
    for step in range(6):
        client.save(step, content(step, SIZE))
        wait_until(lambda: settled(client))
    assert FileStore(tmp_path).steps("run") == [3, 4, 5] == list(client.steps())
    assert node.arena.used == 8  # two of them in memory
    assert client.read(3) == content(3, SIZE)
    client.ask(Kind.DELETE, {"step": 4})
    assert FileStore(tmp_path).steps("run") == [3, 5] == list(client.steps())


def test_damage_on_the_disk_is_noticed(start_node: Any, connect: Any, tmp_path: Path) -> None:
    first = start_node(spill=tmp_path)
    client = connect(first.address, "run")
    client.save(1, content(1, SIZE))
    wait_until(lambda: settled(client))
    first.stop()
    with (tmp_path / "run" / "step-000000000001.safetensors").open("r+b") as file:
        file.seek(BLOCK + 5)
        file.write(b"?")
    client = connect(start_node(spill=tmp_path).address, "run", write=False)
    assert client.get(1, 0) == chunks_of(content(1, SIZE))[0]
    with pytest.raises(Corrupt):
        client.get(1, 1)


def test_files_that_make_no_sense_do_not_stop_the_node(start_node: Any, connect: Any, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").write_text(
        json.dumps(
            {"format": "deepvm-run/1", "run": "odd", "verifier": "00" * 32, "session": None, "past_sessions": []}
        )
    )
    (tmp_path / "odd" / "step-000000000001.json").write_text("{}")
    (tmp_path / "odd" / "step-000000000001.safetensors").write_text("x")
    client = connect(start_node(spill=tmp_path).address, "run")
    client.save(1, content(1, SIZE))
    assert client.ask(Kind.RUNS)[1]["runs"] == ["run"]


def test_two_nodes_do_not_share_a_spill_directory(start_node: Any, tmp_path: Path) -> None:
    node = start_node(spill=tmp_path)
    with pytest.raises(UsageError, match="another memory node uses the spill directory"):
        start_node(spill=tmp_path)
    node.stop()
    start_node(spill=tmp_path)


def test_kill_9_at_any_moment_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """Every checkpoint that a restarted node shows is one that was saved, bit for bit, and it goes on from there."""
    kill_often(tmp_path, rounds=4)


def kill_often(directory: Path, rounds: int) -> None:
    spill = directory / "spill"
    spill.mkdir()
    size, chance = 40 * BLOCK, random.Random(1)
    step = spilled = 0
    for number in range(rounds):
        with (
            NodeProcess(directory, "--spill", str(spill), capacity="64MiB") as node,
            Client(node.address, "run", session=f"s{number}") as client,
        ):
            shown = client.steps()
            assert max(shown, default=0) >= spilled
            for found in shown:
                assert client.read(found) == content(found, size)
            for _ in range(chance.randrange(1, 6)):
                step += 1
                client.save(step, content(step, size))
                spilled = max([spilled, *(s for s, state in client.steps().items() if state == "spilled")])
            timer = threading.Timer(chance.random() * 0.05, os.kill, (node.process.pid, signal.SIGKILL))
            timer.start()
            node.process.wait(10)
            timer.join()
    assert spilled > 0


def test_every_checkpoint_flows_on_to_the_durable_store(start_node: Any, connect: Any, tmp_path: Path) -> None:
    client = connect(start_node(durable=f"file://{tmp_path}").address, "run")
    for step in (1, 2, 3):
        client.save(step, content(step, SIZE))
        wait_until(lambda step=step: client.steps()[step] == "durable")
    assert FileStore(tmp_path).steps("run") == [1, 2, 3]
    assert read_file_store(FileStore(tmp_path), "run", 3) == content(3, SIZE)
    client.ask(Kind.DELETE, {"step": 3})
    assert FileStore(tmp_path).steps("run") == [1, 2]


def test_the_durable_store_keeps_as_many_as_configured(start_node: Any, connect: Any, tmp_path: Path) -> None:
    client = connect(start_node(durable=f"file://{tmp_path}", durable_keep=2).address, "run")
    for step in range(5):
        client.save(step, content(step, SIZE))
        wait_until(lambda: settled(client))
    assert FileStore(tmp_path).steps("run") == [3, 4]


def test_what_was_spilled_and_not_durable_is_written_on_after_a_restart(
    start_node: Any, connect: Any, tmp_path: Path
) -> None:
    (tmp_path / "spill").mkdir()
    first = start_node(spill=tmp_path / "spill")
    client = connect(first.address, "run")
    client.save(1, content(1, SIZE))
    wait_until(lambda: settled(client))
    first.stop()
    for _ in range(2):  # the second time it is there already
        second = start_node(spill=tmp_path / "spill", durable=f"file://{tmp_path}/durable")
        client = connect(second.address, "run", write=False)
        wait_until(lambda client=client: client.steps() == {1: "durable"})
        second.stop()
    assert read_file_store(FileStore(tmp_path / "durable"), "run", 1) == content(1, SIZE)


def test_saves_continue_while_the_durable_store_is_slow_and_the_newest_is_written(
    start_node: Any, connect: Any, tmp_path: Path
) -> None:
    store = SlowStore(tmp_path)
    node = start_node(durable=store)
    client = connect(node.address, "run")
    for step in range(1, 7):
        client.save(step, content(step, SIZE))
    store.go.set()
    wait_until(lambda: client.steps()[6] == "durable")
    wait_until(lambda: settled(client))
    status = client.status()
    assert status["durable_written"] + status["durable_skipped"] == 6
    assert FileStore(tmp_path).steps("run")[-1] == 6
    assert status["durable_skipped"] >= 4
    assert node.arena.used == 8


def test_a_slow_store_does_not_keep_memory_from_a_save(start_node: Any, connect: Any, tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    node = start_node(durable=store, capacity_bytes=8 * BLOCK)  # just two checkpoints
    client = connect(node.address, "run")
    client.save(1, content(1, 4 * BLOCK))
    wait_until(lambda: node.writeback.workers[0]._source is not None)
    client.save(2, content(2, 4 * BLOCK))
    client.save(3, content(3, 4 * BLOCK))  # the first one's blocks are held by the writer, who gives them up
    assert list(client.steps()) == [2, 3]
    store.go.set()
    wait_until(lambda: settled(client))
    assert FileStore(tmp_path).steps("run") == [3]


def test_a_store_that_refuses_is_logged_and_tried_again(start_node: Any, connect: Any, tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.go.set()
    store.failing = True
    client = connect(start_node(durable=store).address, "run")
    client.save(1, content(1, SIZE))
    wait_until(lambda: client.status()["durable_failures"] >= 2)
    assert client.status()["durable_error"] == "the bucket refuses"
    client.save(2, content(2, SIZE))  # saves go on
    store.failing = False
    wait_until(lambda: client.steps()[2] == "durable", timeout_s=20)
    assert client.status()["durable_error"] is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where], capture_output=True, timeout=10)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here: " + mounted.stderr.decode().strip())
    yield where
    subprocess.run(["umount", "-l", where], check=True, timeout=10)


def test_a_full_disk_is_logged_and_saves_continue(start_node: Any, connect: Any, small_disk: Path) -> None:
    client = connect(start_node(spill=small_disk).address, "run")
    client.save(1, content(1, 4 * BLOCK))
    wait_until(lambda: settled(client))
    client.save(2, content(2, 20 * BLOCK))  # more than the disk has
    wait_until(lambda: client.status()["spill_failures"] >= 2)
    assert "no room" in client.status()["spill_error"]
    assert client.steps() == {1: "spilled", 2: "remote"}
    client.save(3, content(3, 4 * BLOCK))
    wait_until(lambda: client.steps()[3] == "spilled", timeout_s=20)
    assert client.read(2) == content(2, 20 * BLOCK)
    assert client.read(3) == content(3, 4 * BLOCK)
    assert FileStore(small_disk).steps("run") == [1, 3]


def test_a_node_whose_spill_directory_was_deleted_ends_without_waiting_for_it(
    start_node: Any, connect: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    node = start_node(spill=folder / "spill", limits={"flush_s": 3600.0})
    client = connect(node.address, "run")
    client.save(1, content(1, SIZE))
    wait_until(lambda: settled(client))
    shutil.rmtree(folder)
    client.save(2, content(2, SIZE))
    wait_until(lambda: client.status()["spill_failures"] >= 1)
    assert client.read(2) == content(2, SIZE)
    client.close()
    node.stop()  # before the hour is over
    assert node.writeback.status()["spill_waiting"] == 1


def save_striped(
    clients: Sequence[Client], addresses: Sequence[str], step: int, data: bytes, replicas: int
) -> Manifest:
    nodes = len(clients)
    for index, client in enumerate(clients):
        client.begin(step, len(data), nodes=nodes, node_index=index, replicas=replicas)
    for number, chunk in enumerate(chunks_of(data)):
        for replica in range(replicas):
            clients[(number + replica) % nodes].put(step, number, chunk)
    manifest = manifest_of(data, "run", step, nodes=tuple(addresses), replicas=replicas)
    for index, client in enumerate(clients):
        client.publish(manifest, node_index=index)
    return manifest


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_nodes_that_share_a_checkpoint_spill_and_serve_it_again(
    start_node: Callable[..., MemoryNode], connect: Any, tmp_path: Path, replicas: int
) -> None:
    data = content(9, 7 * BLOCK + 5)
    directories = [tmp_path / str(index) for index in range(3)]
    for directory in directories:
        directory.mkdir()
    fields = [{"spill": directory, "token": "t"} for directory in directories]
    fields[0]["durable"] = fields[1]["durable"] = f"file://{tmp_path}/durable"
    nodes = [start_node(**options) for options in fields]
    clients = [connect(node.address, "run", token="t") for node in nodes]
    save_striped(clients, [node.address for node in nodes], 1, data, replicas)
    wait_until(lambda: clients[0].steps() == {1: "durable"} and settled(clients[0]))
    for client in clients[1:]:
        wait_until(lambda client=client: client.steps() == {1: "spilled"})
    # node 0 has fetched what it had not, and keeps whole files
    assert read_file_store(FileStore(tmp_path / "durable"), "run", 1) == data
    assert read_file_store(FileStore(directories[0]), "run", 1) == data
    assert (FileStore(directories[1]).steps("run") == []) == (replicas < 3)
    for node in nodes:
        node.stop()
    again = [connect(start_node(spill=d, token="t").address, "run", token="t", write=False) for d in directories]
    for number, chunk in enumerate(chunks_of(data)):
        for replica in range(replicas):
            assert again[(number + replica) % 3].get(1, number) == chunk
    assert [client.manifest(1).digests for client in again] == [again[0].manifest(1).digests] * 3


def test_a_spill_directory_is_made_for_the_node_alone(start_node: Any, tmp_path: Path) -> None:
    start_node(spill=tmp_path / "data")
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
