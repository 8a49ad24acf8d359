"""Download one file: a web address in, its bytes out, with a deadline, a size limit and a few attempts."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from typing import IO

from deepvm.catalog.report import Progress
from deepvm.errors import SourceFailed, UsageError

ATTEMPTS = 3
TIMEOUT_S = 20.0  # of one socket operation
DEADLINE_S = 180.0  # of all attempts: the largest file takes a minute at 1 Mbit/s
BACKOFF_S = 1.0  # doubled after every attempt
_PIECE = 256 * 1024
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})


def download(
    url: str,
    *,
    max_bytes: int,
    timeout_s: float = TIMEOUT_S,
    deadline_s: float = DEADLINE_S,
    backoff_s: float = BACKOFF_S,
    progress: Progress | None = None,
) -> bytes:
    """Return the whole body, or raise SourceFailed. Temporary faults are retried; a refusal is final."""
    shown = public_address(url)
    ends = time.monotonic() + deadline_s
    problem = "no attempt was made"
    for attempt in range(1, ATTEMPTS + 1):
        if progress:
            progress(f"downloading {shown}" + (f", attempt {attempt}" if attempt > 1 else ""))
        try:
            return _once(url, shown, max_bytes, timeout_s, ends)
        except urllib.error.HTTPError as error:
            problem = f"it answered {error.code} {http.client.responses.get(error.code, '')}".strip()
            error.close()
            if error.code not in _TEMPORARY:
                break
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = _reason(error)
        pause_s = backoff_s * 2 ** (attempt - 1)
        if attempt == ATTEMPTS or time.monotonic() + pause_s >= ends:
            break
        time.sleep(pause_s)
    raise SourceFailed(f"{shown} could not be downloaded: {problem}; check the address and the network")


def _once(url: str, shown: str, max_bytes: int, timeout_s: float, ends: float) -> bytes:
    opener = urllib.request.build_opener(_WebOnly)
    request = urllib.request.Request(url, headers={"User-Agent": "deepvm"})  # noqa: S310 - public_address let only http(s) in
    with opener.open(request, timeout=min(timeout_s, max(0.1, ends - time.monotonic()))) as answer:
        length = answer.headers.get("Content-Length")
        expected = int(length) if length and length.isdigit() else None
        if expected is not None and expected > max_bytes:
            raise SourceFailed(f"{shown} has {expected:,} bytes, at most {max_bytes:,} are allowed")
        body = bytearray()
        while piece := answer.read1(_PIECE):  # returns early: a slow server must meet the deadline too
            body += piece
            if len(body) > max_bytes:
                raise SourceFailed(f"{shown} has more than {max_bytes:,} bytes, the most allowed")
            if time.monotonic() > ends:
                raise TimeoutError("it took too long")
    if expected is not None and len(body) != expected:
        raise http.client.IncompleteRead(b"")
    return bytes(body)


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Follow redirections to web addresses only, never to files or other protocols."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        if urllib.parse.urlsplit(newurl).scheme not in ("http", "https"):
            raise SourceFailed(
                f"{public_address(req.full_url)} redirects to something other than http(s): it is not followed"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def public_address(url: str) -> str:
    """Return the address without password and query, as errors and catalogues may show it."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        raise UsageError("the address cannot be read: write it like https://host/vms.csv") from None
    if parts.scheme not in ("http", "https") or not host or any(c <= " " for c in url):
        raise UsageError("the address is not a web address: write it like https://host/vms.csv")
    return f"{parts.scheme}://{host}{port}{parts.path}"


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "it did not answer in time"
    if isinstance(cause, http.client.IncompleteRead):
        return "the connection broke off in the middle"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return type(cause).__name__ if isinstance(cause, Exception) else str(cause)
