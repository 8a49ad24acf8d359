"""Requests to a cloud's metadata service from its own machine, without proxy, redirect or host name -> answers."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from deepvm.errors import UsageError

URL_VARIABLE = "DEEPVM_METADATA_URL"
LINK_LOCAL_URL = "http://169.254.169.254"  # of all three clouds; resolving a name could exceed any time-out
TIMEOUT_S = 1.0  # the service is on the same host
MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    status: int
    text: str
    flavor: str  # identifies Google's service

    @property
    def found(self) -> bool:
        return self.status == 200


class Metadata:
    def __init__(self, url: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        chosen = url or os.environ.get(URL_VARIABLE) or LINK_LOCAL_URL
        try:
            parts = urlsplit(chosen)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme, host, port = "", None, None
        if scheme != "http" or not host:
            raise UsageError(f"{chosen!r} is not a valid URL of a metadata service: write it like {LINK_LOCAL_URL}")
        self._host, self._port, self._timeout_s = host, port or 80, timeout_s

    def ask(self, path: str, headers: Mapping[str, str], *, method: str = "GET") -> Answer | None:
        """Return the answer's text; None if the service cannot be reached, hangs, or does not answer in HTTP."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            text = response.read(MOST_BYTES).decode("utf-8")
            return Answer(status=response.status, text=text, flavor=response.getheader("Metadata-Flavor") or "")
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()


def fields_of(text: str) -> dict[str, Any]:
    """Return a JSON object; empty if the text is anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def iso_time_s(text: object) -> float | None:
    """Read ``2026-08-01T08:22:00Z`` as seconds since 1970; None if it is not a time."""
    if not isinstance(text, str):
        return None
    try:
        return _since_1970(datetime.fromisoformat(text.strip().replace("Z", "+00:00")))
    except (ValueError, OverflowError):
        return None


def mail_time_s(text: object) -> float | None:
    """Read ``Mon, 19 Sep 2016 18:29:47 GMT`` (RFC 1123) as seconds since 1970; None if it is not a time."""
    if not isinstance(text, str):
        return None
    try:
        return _since_1970(parsedate_to_datetime(text))
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _since_1970(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
