"""A step of the run -> a witness: hashes of all state after it. A replayed step -> proof that it has the same result.

A witness of step n has the hashes right after step n + 1, as the undisturbed run computed it. It is a checkpoint
without tensors, of the run ``RUN.witness`` in the same stores. ``checkpointer`` makes them, ``restorer`` replays.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from deepvm.checkpoint import ranks
from deepvm.checkpoint.buffers.staging import view_of
from deepvm.checkpoint.determinism.component import DETERMINISM
from deepvm.checkpoint.handle import SaveHandle, Status
from deepvm.checkpoint.state.capture import Capture
from deepvm.checkpoint.state.documents import witness_rows
from deepvm.checkpoint.state.layout import make_layout
from deepvm.checkpoint.state.skeleton import RESERVED
from deepvm.errors import CheckpointError, DeepvmError, NotFound, StoreError, describe, listed
from deepvm.store.base import Manifest, Store, check_run
from deepvm.store.safetensors import read_header

log = logging.getLogger("deepvm.checkpoint")

FORMAT = "deepvm-witness/1"
SUFFIX = ".witness"
Step = Callable[[], object]
Hashes = dict[str, str]
CALL = "restore(verify='replay')"  # where ranks meet


def witness_run(run: str) -> str:
    return check_run(run + SUFFIX)


# --- hashes -------------------------------------------------------------------------------------------------------


def hashes(components: Mapping[str, Any], capture: Capture) -> Hashes:
    """Hash each tensor, each plain value and each generator. Reads all of the state, at about the speed of memory."""
    captured = capture.take(components)
    found = {name: _hash_tensor(tensor) for name, tensor in captured.tensors.items()}
    for name, text in captured.texts.items():
        value = json.loads(text)
        if name == DETERMINISM:
            found.update({f"generator {kind}": _hash_value(item) for kind, item in value["generators"].items()})
        elif name.startswith(RESERVED):
            continue  # no step depends on it
        elif isinstance(value, dict) and not any(key.startswith("$") for key in value):
            found.update({f"{name}: {key}": _hash_value(item) for key, item in value.items()})
        else:
            found[f"{name}: value"] = _hash_value(value)
    return found


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of all that differs."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _hash_tensor(tensor: torch.Tensor) -> str:
    plain = tensor.detach().to("cpu").contiguous()
    digest = xxhash.xxh3_64(f"{plain.dtype} {tuple(plain.shape)}".encode())
    if plain.numel():
        digest.update(view_of(plain.data_ptr(), plain.nbytes))
    return digest.hexdigest()


def _hash_value(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


# --- witnesses ----------------------------------------------------------------------------------------------------


class Witnesses:
    """Makes a witness of every checkpoint whose next step is reported. The trainer's thread hashes, before another step
    changes the state; a thread of rank 0 writes."""

    def __init__(self, stores: Sequence[Store], run: str, status: Status, deadline_s: float) -> None:
        self._stores, self._run, self._status, self._deadline_s = stores, run, status, deadline_s
        self._name = witness_run(run)
        self._rank, self._world_size = ranks.rank_and_world_size()
        self._capture = Capture()
        self._expected: SaveHandle | None = None
        self._work: queue.SimpleQueue[tuple[SaveHandle, list[str]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # since the first witness

    def expect(self, handle: SaveHandle) -> None:
        """Make the next step the witness of a snapshot."""
        self._expected = handle

    def stepped(self, step: int, components: Mapping[str, Any]) -> None:
        """Hash the state after a step, if it is a witness. Nothing may have changed since the step."""
        handle = self._expected
        if handle is None or step <= handle.step:
            return
        self._expected = None
        if step != handle.step + 1:
            log.warning("step %d has no witness: ckpt.step(%d) was not called", handle.step, handle.step + 1)
            return
        try:
            own = json.dumps(hashes(components, self._capture))
        except Exception as error:  # of the user's own state_dict(), too: training continues
            log.warning("step %d has no witness: %s", handle.step, error)
            own = ""
        texts = ranks.gather_texts(f"step({step})", own) if self._world_size > 1 else [own]
        if self._rank == 0 and all(texts):
            self._work.put((handle, texts))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="deepvm-witness", daemon=True)
                self._thread.start()

    def prune(self, store: Store) -> None:
        """Delete witnesses whose checkpoint is gone. That of the newest may not be committed yet."""
        kept = store.steps(self._run)
        for step in store.steps(self._name):
            if step not in kept and step < max(kept, default=0):
                store.delete(self._name, step)

    def close(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            handle, texts = work
            try:
                handle.wait("remote", self._deadline_s)
                chunk_bytes = self._stores[0].manifest(self._run, handle.step).chunk_bytes
                document = _document(handle.step, texts)
                for store in self._stores:
                    write_witness(store, self._name, handle.step, document, chunk_bytes)
                    self.prune(store)
                self._status.last_witness_step = handle.step
            except DeepvmError as error:
                log.warning("step %d has no witness: %s", handle.step, error)


def _document(step: int, texts: Sequence[str]) -> bytes:
    """Return the bytes of a witness. Ranks differ in little: all but the first have only the hashes that differ."""
    first, *others = (json.loads(text) for text in texts)
    rows = [first, *({k: h for k, h in other.items() if first.get(k) != h} for other in others)]
    text = json.dumps({"step": step, "after": step + 1, "ranks": rows}, separators=(",", ":"))
    metadata = {"format": FORMAT, "witness": text}
    header = make_layout([], metadata, 0).header(metadata)
    assert header is not None  # noqa: S101 - its size is that of this text
    return header


def write_witness(store: Store, name: str, step: int, document: bytes, chunk_bytes: int) -> None:
    writer = store.writer(name, step, size_bytes=len(document), chunk_bytes=chunk_bytes)
    try:
        digests = []
        for chunk, start in enumerate(range(0, len(document), chunk_bytes)):
            piece = memoryview(document)[start : start + chunk_bytes]
            digests.append(xxhash.xxh3_64_intdigest(piece))
            writer.put(chunk, [piece], digests[-1])
        writer.publish(
            Manifest(
                run=name,
                step=step,
                size_bytes=len(document),
                chunk_bytes=chunk_bytes,
                digests=digests,
                created_s=time.time(),
                facts={"witness_of": name.removesuffix(SUFFIX), "format": FORMAT},
            )
        )
    except BaseException:
        writer.abort()
        raise


def read_witness(stores: Sequence[Store], run: str, step: int) -> list[Hashes]:
    """Return every rank's hashes after the next step; empty if no store has a witness of this one."""
    name = witness_run(run)
    problems: list[str] = []
    for store in stores:
        try:
            return witness_rows(read_header(store, store.manifest(name, step)).metadata, FORMAT, step)
        except NotFound:
            continue
        except StoreError as error:
            problems.append(f"the witness of step {step} in {store.url} cannot be read: {error}")
            log.warning("%s", problems[-1])
    if problems:
        raise CheckpointError("; ".join(problems))
    return []


# --- replay -------------------------------------------------------------------------------------------------------


def replay_step(
    stores: Sequence[Store], run: str, step: int, make_step: Step, components: Callable[[], Mapping[str, Any]]
) -> None:
    """Replay the step after a restored one, and raise CheckpointError if its result differs. The state is then that
    after the step: restore again."""
    what = f"step {step + 1}, replayed from step {step},"

    def find() -> Hashes:
        with _explained(f"step {step} cannot be replayed"):
            return _own_witness(stores, run, step)

    def replay() -> None:
        with _explained(f"{what} failed"):
            make_step()
            found = differences(witness, hashes(components(), Capture()))
        if found:
            raise CheckpointError(f"{what} is not what the saved run computed: {listed(found, ', ')} differ")

    witness, _ = ranks.agree(CALL, find, deadline_s=ranks.START_S)  # a step that not all ranks make never ends
    ranks.agree(CALL, replay, deadline_s=ranks.START_S)


@contextmanager
def _explained(failed: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{failed}: {describe(error)}") from error


def _own_witness(stores: Sequence[Store], run: str, step: int) -> Hashes:
    rank, world_size = ranks.rank_and_world_size()
    rows = read_witness(stores, run, step)
    if not rows:
        raise CheckpointError("it has no witness: no Checkpointer(replay=...) was given its next step")
    if len(rows) != world_size:
        raise CheckpointError(f"it was saved by {len(rows)} ranks: replay it with {len(rows)} ranks, not {world_size}")
    return rows[rank]
