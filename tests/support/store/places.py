"""The places that the contract is tried on: each opens stores, harms what is kept, and tells all that is left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

from deepvm.store import Store, open_store
from tests.support.store.s3_server import ADMIN_ACCESS, ADMIN_SECRET, S3Server


class Place(Protocol):
    name: str

    def open(self) -> Store:
        """A store as another process would open it."""
        ...

    def flip(self, run: str, step: int, offset: int) -> None:
        """Change one stored byte."""
        ...

    def everything(self) -> list[str]:
        """All that is kept, hidden and half-done things too."""
        ...


class FilePlace:
    name = "files"

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> Store:
        return open_store(f"file://{self.root}")

    def flip(self, run: str, step: int, offset: int) -> None:
        with (self.root / run / f"step-{step:012d}.safetensors").open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))

    def everything(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file())


class S3Place:
    name = "s3"

    def __init__(self, server: S3Server, bucket: str) -> None:
        self.server, self.bucket = server, bucket
        self.client = boto_client(server)
        self.client.create_bucket(Bucket=bucket)

    def open(self) -> Store:
        with mock.patch.dict(os.environ, self.server.environment):
            return open_store(f"s3://{self.bucket}/some/prefix/")

    def flip(self, run: str, step: int, offset: int) -> None:
        key = f"some/prefix/{run}/step-{step:012d}.safetensors"
        data = bytearray(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())
        data[offset] ^= 1
        self.client.put_object(Bucket=self.bucket, Key=key, Body=bytes(data))

    def everything(self) -> list[str]:
        objects = self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        uploads = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return sorted([o["Key"] for o in objects] + [f"upload of {u['Key']}" for u in uploads])


def boto_client(server: S3Server) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=ADMIN_ACCESS,
        aws_secret_access_key=ADMIN_SECRET,
        region_name="us-east-1",
        config=Config(connect_timeout=5, read_timeout=30),
    )


class MemoryPlace:
    def __init__(self, nodes: list[Any], replicas: int) -> None:
        self.nodes, self.replicas = nodes, replicas
        self.name = "memory" if len(nodes) == 1 else "memory-replicated"

    def open(self) -> Store:
        addresses = ",".join(node.address for node in self.nodes)
        return open_store(f"memory://{addresses}?replicas={self.replicas}", key="the key of this run")

    def flip(self, run: str, step: int, offset: int) -> None:
        """In every copy, since one good copy is enough."""
        for node in self.nodes:
            checkpoint = node.runs.find(run).checkpoint(step)
            chunk, within = divmod(offset, checkpoint.manifest.chunk_bytes)
            if checkpoint.has(chunk):
                with checkpoint.chunk(chunk) as view:
                    view[within] ^= 1

    def everything(self) -> list[str]:
        kept = [
            f"{run.name} {kind}"
            for node in self.nodes
            for run in node.runs
            for kind in (*run.checkpoints, *run.uploads)
        ]
        return kept + [f"{node.arena.used} blocks of {node.address}" for node in self.nodes if node.arena.used]


@contextlib.contextmanager
def memory_place(nodes: int, replicas: int, block_bytes: int) -> Iterator[MemoryPlace]:
    from deepvm.memnode import MemoryNode

    running = [
        MemoryNode(listen="127.0.0.1:0", capacity_bytes=2**25, block_bytes=block_bytes, buffers=8) for _ in range(nodes)
    ]
    try:
        for node in running:
            node.start()
        yield MemoryPlace(running, replicas)
    finally:
        with ThreadPoolExecutor(nodes) as pool:  # each takes half a second to stop
            list(pool.map(lambda node: node.stop(), running))
