"""Checkpoints in object storage (S3, Google Cloud Storage, Azure): the same two names as in a directory.

The bytes are one object, uploaded in parallel parts, which exists only once all parts do; the manifest is put last.
obstore has no access to single parts, so chunks are streamed to it in order (ordered_stream.py), and its own multipart
upload cuts them. An aborted upload is removed. One whose process died leaves hidden parts, for which buckets have a
lifecycle rule (abort incomplete multipart uploads).

A run belongs to one session at a time. A step saved again replaces the old one, whose manifest is removed just before
the new bytes appear. If two sessions save the same step of one run at once, both fail and none counts as whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from deepvm.errors import AccessDenied, Corrupt, MissingExtra, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.protocol.sockets import is_loopback
from deepvm.store.base import MOST_MANIFEST_BYTES, Manifest, Store, check_run, is_run
from deepvm.store.chunks import UploadCheck, as_bytes, check_length, read_manifest, truncated, verify_chunk
from deepvm.store.file_names import DATA, MANIFEST, stem, whole_steps
from deepvm.store.objects.ordered_stream import OrderedStream

PART_BYTES = 8 * 2**20  # S3 takes 5 MiB at least; larger parts mean fewer requests and more memory
MOST_PARTS = 9_000  # S3 takes 10,000
MOST_CONCURRENCY = 8
MEMORY_BYTES = 256 * 2**20
ABORT_S = 30.0  # to remove an upload's parts; the lifecycle rule removes what is left then

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


class ObjectStore(Store):
    """A bucket, or a prefix in it. Endpoint and credentials come from the environment, as obstore reads them."""

    def __init__(
        self,
        url: str,
        client: Any,
        *,
        memory_bytes: int = MEMORY_BYTES,
        stall_s: float = 300.0,
    ) -> None:
        self._url, self._client = url, client
        self._memory_bytes, self._stall_s = memory_bytes, stall_s

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        memory_bytes: int = MEMORY_BYTES,
        request_s: float = 60.0,
        connect_s: float = 5.0,
        retries: int = 5,
        stall_s: float = 300.0,
    ) -> ObjectStore:
        """Open a store. ``request_s`` limits each request, ``stall_s`` how long an upload may make no progress."""
        try:
            import obstore
        except ImportError:
            raise MissingExtra("object storage", "object") from None
        parts = urlsplit(url)
        if not parts.netloc or parts.query or parts.fragment or "@" in parts.netloc:
            raise UsageError(f"{parts.scheme}:// URLs have a bucket and a prefix only: {parts.scheme}://BUCKET/PREFIX")
        options: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=connect_s),
            "timeout": timedelta(seconds=request_s),
        }
        if parts.scheme == "s3" and _plain_http_allowed():
            options["allow_http"] = True
        retry = {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=2 * request_s),
            "backoff": {"max_backoff": timedelta(seconds=5)},
        }
        place = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        with _explained(place):
            client = obstore.store.from_url(place, client_options=options, retry_config=retry)  # type: ignore[call-overload]
        return cls(place, client, memory_bytes=memory_bytes, stall_s=stall_s)

    @property
    def url(self) -> str:
        return self._url

    @property
    def durable(self) -> bool:
        return True

    def runs(self) -> list[str]:
        with _explained(self._url):
            found = self._client.list_with_delimiter()["common_prefixes"]
        names = sorted({str(path).rstrip("/").rpartition("/")[2] for path in found})
        return [name for name in names if is_run(name) and self.steps(name)]

    def steps(self, run: str) -> list[int]:
        with _explained(self._url):
            pages = self._client.list(f"{check_run(run)}/", chunk_size=1000)
            return whole_steps({str(entry["path"]).rpartition("/")[2] for page in pages for entry in page})

    def manifest(self, run: str, step: int) -> Manifest:
        key = _key(check_run(run), step, MANIFEST)
        with _explained(self._url, missing=f"{self._url} has no step {step} of run {run}"):
            found = self._client.get(key)
            size = found.meta["size"]
            if size > MOST_MANIFEST_BYTES:
                raise Corrupt(f"{self._url}/{key} has {size} bytes, a manifest has at most {MOST_MANIFEST_BYTES}")
            data = found.bytes()
        return read_manifest(bytes(data), run, step, f"{self._url}/{key}")

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        key = _key(manifest.run, manifest.step, DATA)
        place, buffer = f"{self._url}/{key}", as_bytes(into)
        offset = check_length(manifest, chunk, buffer)
        with _explained(self._url, missing=f"{place} is missing: use another step"):
            data = memoryview(self._client.get_range(key, start=offset, length=len(buffer)))
        if len(data) != len(buffer):
            raise truncated(place, offset + len(data), manifest)
        buffer[:] = data
        verify_chunk(manifest, chunk, buffer, place)

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> ObjectWriter:
        check = UploadCheck(run, step, size_bytes, chunk_bytes)
        return ObjectWriter(self._client, self._url, check, memory_bytes=self._memory_bytes, stall_s=self._stall_s)

    def delete(self, run: str, step: int) -> None:
        for suffix in (MANIFEST, DATA):
            with _explained(self._url), contextlib.suppress(FileNotFoundError):
                self._client.delete(_key(check_run(run), step, suffix))

    def close(self) -> None:
        """Nothing is kept open."""


class ObjectWriter:
    """Write one checkpoint into a bucket: a thread streams it, chunks wait for their turn."""

    def __init__(self, client: Any, url: str, check: UploadCheck, *, memory_bytes: int, stall_s: float) -> None:
        self._client, self._url, self._uploaded, self._stall_s = client, url, check, stall_s
        self._part_bytes = max(PART_BYTES, -(-check.size_bytes // MOST_PARTS))
        self._concurrency = max(1, min(MOST_CONCURRENCY, memory_bytes // 2 // self._part_bytes))
        waiting_bytes = max(0, memory_bytes - (self._concurrency + 1) * self._part_bytes)
        self._chunks = OrderedStream(check.chunks, budget_bytes=waiting_bytes, stall_s=stall_s)
        self._thread = threading.Thread(target=self._upload, name=f"deepvm-upload-{check.step}", daemon=True)
        self._start = threading.Lock()
        self._e_tag: str | None = None

    def put(self, chunk: int, pieces: Sequence[memoryview], digest: int) -> None:
        self._uploaded.span(chunk, sum(piece.nbytes for piece in pieces))
        self._chunks.check()
        with self._start:
            if self._thread.ident is None:
                self._thread.start()
        self._chunks.add(chunk, b"".join(pieces))  # the one copy: the pieces may change when this returns
        self._uploaded.put(chunk, digest)

    def publish(self, manifest: Manifest) -> None:
        self._chunks.check()
        self._uploaded.check(manifest)
        # The new bytes appear when the stream ends, so a manifest of older ones must be gone before.
        with _explained(self._url), contextlib.suppress(FileNotFoundError):
            self._client.delete(_key(manifest.run, manifest.step, MANIFEST))
        self._chunks.seal()
        self._wait_for_upload()
        self._put_manifest(manifest)
        self._chunks.stop(StoreError(f"step {manifest.step} of {manifest.run} is published already"))

    def abort(self) -> None:
        self._chunks.stop(StoreError(f"step {self._uploaded.step} of {self._uploaded.run} was aborted"))
        if self._thread.ident is not None:
            self._thread.join(ABORT_S)

    def _upload(self) -> None:
        """Stream the chunks into a multipart upload. If the stream fails, obstore removes the parts."""
        try:
            with _explained(self._url):
                result = self._client.put(
                    _key(self._uploaded.run, self._uploaded.step, DATA),
                    self._chunks.stream(),
                    use_multipart=self._uploaded.size_bytes > self._part_bytes,
                    chunk_size=self._part_bytes,
                    max_concurrency=self._concurrency,
                )
            self._e_tag = result["e_tag"]
        except BaseException as error:
            self._chunks.stop(error)

    def _wait_for_upload(self) -> None:
        seen, deadline = -1, 0.0
        while self._thread.is_alive():
            if self._chunks.taken != seen:
                seen, deadline = self._chunks.taken, time.monotonic() + self._stall_s
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"{self._url}: the upload was not acknowledged within {self._stall_s:g} s")
            self._thread.join(0.2)
        self._chunks.check()

    def _put_manifest(self, manifest: Manifest) -> None:
        key, document = _key(manifest.run, manifest.step, MANIFEST), manifest.to_bytes()
        rival = AccessDenied(
            f"another session saved step {manifest.step} of run {manifest.run} in {self._url} at the same time: "
            "give each session a run name of its own"
        )
        with _explained(self._url):
            try:
                self._client.put(key, document, mode="create", use_multipart=False)
            except Exception as error:
                if type(error).__name__ not in ("AlreadyExistsError", "PreconditionError"):
                    raise
                # ours, if the answer to a first attempt was lost
                if bytes(self._client.get(key).bytes()) != document:
                    raise rival from error
            found = self._client.head(_key(manifest.run, manifest.step, DATA))["e_tag"]
            if self._e_tag and found and found != self._e_tag:
                self._client.delete(key)
                raise rival


def _key(run: str, step: int, suffix: str) -> str:
    return f"{run}/{stem(step)}{suffix}"


def _plain_http_allowed() -> bool:
    """True if the endpoint is on this machine; elsewhere the user must allow HTTP without encryption."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next((os.environ[name] for name in names if os.environ.get(name)), "")
    parts = urlsplit(endpoint)
    if parts.scheme != "http":
        return False
    host = parts.hostname or ""
    if not is_loopback(host) and os.environ.get("AWS_ALLOW_HTTP", "").lower() not in ("1", "true", "yes"):
        raise UsageError(f"the S3 endpoint at {host} is not encrypted: use https://, or set AWS_ALLOW_HTTP=true")
    return True


# --- errors -------------------------------------------------------------------------------------------------------

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
# Without credentials in the environment the client asks the cloud's metadata service, which is not there elsewhere.
_NO_CREDENTIALS = ("/latest/api/token", "/latest/meta-data", "169.254.169.254", "metadata", "credential")


@contextlib.contextmanager
def _explained(url: str, *, missing: str | None = None) -> Iterator[None]:
    """Turn every failure of the client into a StoreError of one sentence, without secrets and debug output."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, FileNotFoundError) and not type(error).__module__.startswith("obstore"):
            raise
        raise _store_error(error, url, missing) from None


def _store_error(error: Exception, url: str, missing: str | None) -> StoreError:
    text = str(error)
    code, status = _CODE.search(text), _STATUS.search(text)
    reason = code[1] if code else f"status {status[1]}" if status else _first_sentence(text)
    number = int(status[1]) if status else 0
    scheme, bucket = url.split("://")[0], urlsplit(url).netloc
    kind = type(error).__name__
    if reason in ("NoSuchBucket", "ContainerNotFound"):
        return NotFound(f"{scheme}://{bucket} does not exist: create the bucket, or correct the URL")
    if number == 416:
        return Corrupt(f"{url}: an object is shorter than in its manifest: use another step")
    if isinstance(error, FileNotFoundError):
        return NotFound(missing or f"{url}: not found ({reason})")
    if number in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return AccessDenied(f"{url} refused the credentials ({reason}): check {_CREDENTIALS[scheme]}")
    if not status and any(word in text for word in _NO_CREDENTIALS):
        return AccessDenied(f"no credentials for {url} were found ({reason}): set {_CREDENTIALS[scheme]}")
    return StoreUnavailable(f"{url} failed ({reason}): check the endpoint and the network, or try again later")


def _first_sentence(text: str) -> str:
    line = text.split("\n")[0].strip()
    return re.sub(r"//[^/@\s]*@", "//", line)[:300]
