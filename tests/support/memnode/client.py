"""A minimal client for the tests: one connection, requests one by one or raw bytes, and whole saves in one call."""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.store.base import Manifest
from tests.support.memnode.plain_client import PlainClient
from tests.support.waiting import wait_until

BLOCK = 64 * 2**10
DEEPVM = str(Path(sys.executable).with_name("deepvm"))


def chunks_of(data: bytes, block: int = BLOCK) -> list[bytes]:
    return [data[start : start + block] for start in range(0, len(data), block)]


def digest_of(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def content(seed: int, size: int) -> bytes:
    """Bytes that differ by seed, cheap to make."""
    pattern = struct.pack("<QQ", seed, seed * 0x9E3779B97F4A7C15 % 2**64)
    return (pattern * (size // len(pattern) + 1))[:size]


def manifest_of(data: bytes, run: str, step: int, **fields: Any) -> Manifest:
    fields.setdefault("created_s", float(min(step, 2**31)))
    return Manifest(
        run=run,
        step=step,
        size_bytes=len(data),
        chunk_bytes=BLOCK,
        digests=[digest_of(chunk) for chunk in chunks_of(data)],
        **fields,
    )


class Client(PlainClient):
    def __init__(self, address: str, run: str | None = None, *, key: str = "key", **fields: Any) -> None:
        options = {name: fields.pop(name) for name in ("token", "tls", "timeout_s") if name in fields}
        super().__init__(address, **options)
        if run is not None:
            try:
                self.open_run(run, key=key, **fields)
            except BaseException:
                self.close()
                raise

    def open_run(
        self, run: str, *, key: str = "key", session: str = "s1", write: bool = True, both: bool = True
    ) -> None:
        self.run = run
        verifier = frames.run_verifier(run, key)
        nonces = self.node_nonce, self.client_nonce
        meta = {"run": run, "session": session, "write": write, "proof": frames.proof(verifier, f"run/{run}", *nonces)}
        if both:
            meta["verifier"] = frames.masked(verifier, self._token, *nonces)
        self.ask(Kind.OPEN, meta)

    def begin(self, step: int, size: int, **fields: Any) -> None:
        self.ask(Kind.BEGIN, {"step": step, "size_bytes": size, "layout": "l", "rank": 0, "world_size": 1, **fields})

    def put(self, step: int, chunk: int, data: bytes, *, digest: int | None = None) -> None:
        self.puts(step, {chunk: data}, None if digest is None else {chunk: digest})

    def puts(
        self,
        step: int,
        chunks: dict[int, bytes],
        digests: dict[int, int] | None = None,
        tagged: dict[int, int] | None = None,
    ) -> None:
        """Several chunks in one frame; with the digests of others, or tags of other digests, where they are given."""
        found = {chunk: digest_of(data) for chunk, data in chunks.items()} | (digests or {})
        length = sum(map(len, chunks.values())) + len(chunks) * frames.DIGEST.size
        frame = self.head_of(Kind.PUTS, {"step": step, "chunks": list(chunks)}, length, 0)
        for chunk, data in chunks.items():
            frame += data + frames.DIGEST.pack(found[chunk])
            frame += self._tag(frames.DIGEST.pack((tagged or found)[chunk]))
        self.send(frame)
        found, answer, _ = self._receive()
        if found is Kind.ERROR:
            frames.raise_error(answer)
        assert found is Kind.OK

    def send_document(
        self, kind: Kind, meta: dict[str, Any], body: bytes, *, tagged: bytes, digest: int | None = None
    ) -> None:
        """With the tag, or the digest, of another."""
        head = self.head_of(kind, meta, len(body), digest_of(body) if digest is None else digest)
        self.send(head + body + self._tag(hashlib.sha256(tagged).digest()))

    def head_of(self, kind: Kind, meta: dict[str, Any], body_bytes: int = 0, digest: int = 0) -> bytes:
        self._request += 1
        return self.tagged(frames.encode(kind, self._request, meta, body_bytes, digest))

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def answered(self) -> bool:
        """Whether something has come that was not taken off the wire yet."""
        return bool(select.select([self.sock], [], [], 0)[0])

    def answer(self) -> tuple[Kind, dict[str, Any], bytes]:
        return self._receive()

    def seal(self, step: int, chunks: Sequence[int], timeout_s: float = 0) -> list[int]:
        body = struct.pack(f"<{len(chunks)}I", *chunks)
        _, _, data = self.ask(Kind.SEAL, {"step": step, "timeout_s": timeout_s}, body)
        return list(struct.unpack(f"<{len(data) // 8}Q", data))

    def keep(self, step: int, from_step: int, kept: dict[int, int]) -> None:
        body = struct.pack(f"<{len(kept)}I", *kept) + struct.pack(f"<{len(kept)}Q", *kept.values())
        self.ask(Kind.KEEP, {"step": step, "from_step": from_step}, body)

    def offer(self, step: int, offered: dict[int, int]) -> list[int]:
        body = struct.pack(f"<{len(offered)}I", *offered) + struct.pack(f"<{len(offered)}Q", *offered.values())
        return self._chunks(self.ask(Kind.OFFER, {"step": step}, body)[2])

    def link(self, step: int, chunks: dict[int, bytes], *, digests: dict[int, int] | None = None) -> list[int]:
        """Claim to have these chunks; with the digests of others, where they are given."""
        found = {chunk: digest_of(data) for chunk, data in chunks.items()} | (digests or {})
        key = frames.content_key(self.node_nonce, self.client_nonce)
        proofs = [frames.content_proof(key, [memoryview(data)]) for data in chunks.values()]
        return self.link_with(step, found, proofs)

    def link_with(self, step: int, digests: dict[int, int], proofs: list[bytes]) -> list[int]:
        numbers = struct.pack(f"<{len(digests)}I", *digests) + struct.pack(f"<{len(digests)}Q", *digests.values())
        return self._chunks(self.ask(Kind.LINK, {"step": step}, numbers + b"".join(proofs))[2])

    @staticmethod
    def _chunks(answer: bytes) -> list[int]:
        return list(struct.unpack(f"<{len(answer) // 4}I", answer))

    def publish(self, manifest: Manifest, **meta: Any) -> None:
        self.ask(Kind.PUBLISH, {"step": manifest.step, **meta}, manifest.to_bytes())

    def save(self, step: int, data: bytes) -> None:
        self.begin(step, len(data))
        self.save_chunks(step, data)
        self.publish(manifest_of(data, self.run, step))

    def save_what_is_new(self, step: int, data: bytes, **begin: Any) -> list[int]:
        """As a trainer does that has something in common with others; the chunks that were sent."""
        self.begin(step, len(data), **begin)
        chunks = dict(enumerate(chunks_of(data)))
        candidates = self.offer(step, {chunk: digest_of(part) for chunk, part in chunks.items()})
        linked = self.link(step, {chunk: chunks[chunk] for chunk in candidates})
        new = [chunk for chunk in chunks if chunk not in linked]
        for chunk in new:
            self.put(step, chunk, chunks[chunk])
        self.publish(manifest_of(data, self.run, step))
        return new

    def save_chunks(self, step: int, data: bytes) -> None:
        for number, chunk in enumerate(chunks_of(data)):
            self.put(step, number, chunk)

    def steps(self) -> dict[int, str]:
        return {row["step"]: row["state"] for row in self.ask(Kind.STEPS)[1]["steps"]}

    def manifest(self, step: int) -> Manifest:
        return Manifest.from_bytes(self.ask(Kind.MANIFEST, {"step": step})[2])

    def get(self, step: int, chunk: int) -> bytes:
        return self.ask(Kind.GET, {"step": step, "chunk": chunk})[2]

    def read(self, step: int) -> bytes:
        manifest = self.manifest(step)
        data = b"".join(self.get(step, chunk) for chunk in range(len(manifest.digests)))
        assert [digest_of(chunk) for chunk in chunks_of(data)] == list(manifest.digests)
        return data

    def status(self) -> dict[str, Any]:
        return self.ask(Kind.STATUS)[1]


class NodeProcess:
    """``deepvm memory-node`` as a process of its own."""

    def __init__(self, directory: Path, *words: str, capacity: str = "16MiB", **environment: str) -> None:
        self.ready, self.log = directory / "ready", directory / "node.log"
        self.ready.unlink(missing_ok=True)
        command = [DEEPVM, "memory-node", "--listen", "127.0.0.1:0", "--capacity", capacity, "--block", "64KiB"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--ready-file", str(self.ready), *words], stderr=log, env={**os.environ, **environment}
            )
        wait_until(lambda: self.ready.exists() or self.process.poll() is not None, timeout_s=20)
        if not self.ready.exists():
            raise AssertionError(self.log.read_text())
        self.address = self.ready.read_text()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def figures(self) -> dict[str, int]:
        """RSS in kB, threads and open files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.M)}
        return {**found, "fds": len(os.listdir(f"/proc/{self.process.pid}/fd"))}
