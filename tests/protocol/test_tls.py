"""TLS: only the given certificate is trusted, and it must name the address, for whoever connects."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deepvm.cli.app import run as deepvm
from deepvm.errors import StoreError, UsageError
from deepvm.memnode import MemoryNode
from deepvm.store import open_store
from deepvm.store.base import Store
from deepvm.store.memory.connection import Connection
from deepvm.store.memory.store import MemoryStore
from tests.support.certificates import make_certificate, make_signed_certificate
from tests.support.memnode.client import BLOCK, NodeProcess, content, manifest_of

DATA = content(1, 3 * 2**16 + 77)
Status = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def node(start_node: Any, pair: tuple[Path, Path]) -> MemoryNode:
    return start_node(token="t", tls_cert=pair[0], tls_key=pair[1])


def save(store: Store) -> None:
    manifest = manifest_of(DATA, "run", 1)
    writer = store.writer("run", 1, size_bytes=len(DATA), chunk_bytes=BLOCK)
    for chunk, digest in enumerate(manifest.digests):
        start, length = manifest.span(chunk)
        writer.put(chunk, [memoryview(DATA)[start : start + length]], digest)
    writer.publish(manifest)


def read(store: Store) -> bytes:
    manifest, found = store.manifest("run", 1), bytearray(len(DATA))
    for chunk in range(len(manifest.digests)):
        start, length = manifest.span(chunk)
        store.read_chunk(manifest, chunk, memoryview(found)[start : start + length])
    return bytes(found)


def dialled(node: MemoryNode, host: str) -> str:
    return f"{host}:{node.address.rpartition(':')[2]}"


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Status:
    """Ask a node as the command does: its exit code, stdout and stderr."""
    monkeypatch.setenv("DEEPVM_TOKEN", "t")

    def ask(address: str, *words: str) -> tuple[int, str, str]:
        code = deepvm(["memory-node", "--status", address, "--json", *words])
        return code, *capsys.readouterr()

    return ask


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_by_url_saves_and_reads_over_tls(node: MemoryNode, pair: tuple[Path, Path], host: str) -> None:
    url = f"memory://{dialled(node, host)}?tls={pair[0]}"
    with closing(open_store(url, token="t", key="k")) as store:
        save(store)
        assert read(store) == DATA


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_status_is_asked_over_tls(node: MemoryNode, pair: tuple[Path, Path], host: str, status: Status) -> None:
    code, out, err = status(dialled(node, host), "--tls-cert", str(pair[0]))
    assert (code, err) == (0, "")
    assert '"connections": 1' in out


def test_a_node_by_command_is_asked_over_tls(tmp_path: Path, pair: tuple[Path, Path], status: Status) -> None:
    certificate, key = map(str, pair)
    with NodeProcess(tmp_path, "--tls-cert", certificate, "--tls-key", key, DEEPVM_TOKEN="t") as node:
        assert status(node.address, "--tls-cert", certificate)[0] == 0
        assert status(node.address)[0] == 1


@pytest.mark.parametrize(
    ("names", "host"), [("DNS:localhost", "127.0.0.1"), ("IP:127.0.0.1", "localhost"), (None, "127.0.0.1")]
)
def test_a_certificate_of_other_names_is_refused_alike_by_all(
    tmp_path: Path, start_node: Any, names: str | None, host: str, status: Status
) -> None:
    certificate, key = make_certificate(tmp_path / "other", names)
    address = dialled(start_node(token="t", tls_cert=certificate, tls_key=key), host)
    code, out, err = status(address, "--tls-cert", str(certificate))
    assert code == 1
    assert f"not valid for '{host}'" in " ".join((out + err).split())
    with (
        closing(open_store(f"memory://{address}?tls={certificate}", token="t")) as store,
        pytest.raises(StoreError, match=f"not valid for '{re.escape(host)}'"),
    ):
        store.runs()


def test_another_certificate_is_not_trusted(node: MemoryNode, tmp_path: Path) -> None:
    other, _ = make_certificate(tmp_path / "other")
    with (
        closing(open_store(f"memory://{node.address}?tls={other}", token="t")) as store,
        pytest.raises(StoreError, match="shows a certificate that is not trusted: self-signed certificate"),
    ):
        store.runs()


def test_the_system_certificates_are_not_trusted_beside_the_given_one(pair: tuple[Path, Path]) -> None:
    from deepvm.protocol.credentials import client_tls

    context = client_tls(pair[0])
    assert context is not None
    assert [dict(field[0] for field in one["subject"]) for one in context.get_ca_certs()] in (
        [],
        [{"commonName": "node"}],
    )
    assert context.cert_store_stats()["x509"] == 1


@pytest.mark.parametrize("kind", ["missing", "garbage", "empty", "directory", "blank"])
def test_a_certificate_that_cannot_be_used_is_reported_in_one_sentence(
    tmp_path: Path, kind: str, status: Status
) -> None:
    path = tmp_path / kind
    if kind in ("garbage", "empty"):
        path.write_bytes(b"\x00\xff nothing\n" if kind == "garbage" else b"")
    elif kind == "directory":
        path.mkdir()
    given = "" if kind == "blank" else str(path)
    with pytest.raises(UsageError, match="certificate") as refused:
        open_store(f"memory://127.0.0.1:7070?tls={given}")
    assert "_ssl.c" not in str(refused.value)
    if kind != "blank":
        code, _, err = status("127.0.0.1:1", "--tls-cert", str(path))
        assert (code, err.count("\n") <= 3, "Traceback" in err) == (2, True, False)


def test_nodes_fetch_from_each_other_over_tls(start_node: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    certificate, key = pair
    first = start_node(token="t", tls_cert=certificate, tls_key=key, spill=spill)
    second = start_node(token="t", tls_cert=certificate, tls_key=key)
    url = f"memory://{first.address},{second.address}?tls={certificate}"
    with closing(open_store(url, token="t", key="k")) as store:
        assert isinstance(store, MemoryStore)
        save(store)
        assert first.writeback.flush(20)
    assert next(spill.rglob("*.safetensors")).read_bytes() == DATA


def test_who_speaks_plainly_to_a_node_with_tls_is_not_understood(node: MemoryNode) -> None:
    with pytest.raises(StoreError):
        Connection.connect(node.address, token="t", connect_s=0.5)


def test_a_certificate_that_does_not_fit_its_key_is_refused(start_node: Any, tmp_path: Path, pair: Any) -> None:
    _, key = make_certificate(tmp_path / "other")
    with pytest.raises(UsageError, match="the key belongs to another certificate"):
        start_node(tls_cert=pair[0], tls_key=key)


def test_a_certificate_that_an_unknown_authority_signed_is_trusted_if_it_is_the_given_one(
    start_node: Any, tmp_path: Path
) -> None:
    certificate, key = make_signed_certificate(tmp_path / "signed")
    node = start_node(token="t", tls_cert=certificate, tls_key=key)
    with closing(open_store(f"memory://{node.address}?tls={certificate}", token="t", key="k")) as store:
        save(store)
        assert read(store) == DATA
