"""Sources of notices by name."""

from __future__ import annotations

import signal
from pathlib import Path

from deepvm.errors import UnknownName, UsageError
from deepvm.runtime.notices.aws import AwsNotices
from deepvm.runtime.notices.azure import AzureNotices
from deepvm.runtime.notices.base import Notice, NoticeSource
from deepvm.runtime.notices.files import FileNotices
from deepvm.runtime.notices.gcp import GcpNotices
from deepvm.runtime.notices.signals import SignalNotices
from deepvm.units import parse_seconds

CLOUDS: dict[str, type[AwsNotices] | type[GcpNotices] | type[AzureNotices]] = {
    "aws": AwsNotices,
    "gcp": GcpNotices,
    "azure": AzureNotices,
}
NAMES = (*CLOUDS, "auto", "none", "file:PATH", "signal:USR1:30s")


class NoNotices:
    """The source of a machine that is never preempted, or without notice."""

    interval_s = 3600.0

    def poll(self) -> Notice | None:
        return None


def open_source(text: str, *, metadata_url: str | None = None) -> NoticeSource:
    """Return the source of a name: ``aws``, ``gcp``, ``azure``, ``file:PATH``, ``signal:USR1:30s``, ``none``, or
    ``auto``.

    ``auto`` finds the cloud that answers within a few seconds, and is ``none`` outside of a cloud. DEEPVM_METADATA_URL
    names a metadata service at another address."""
    kind, _, rest = text.partition(":")
    if kind in CLOUDS and not rest:
        return CLOUDS[kind](metadata_url)
    if text == "auto":
        return _present_cloud(metadata_url) or NoNotices()
    if text == "none":
        return NoNotices()
    if kind == "file":
        if not rest:
            raise UsageError(f"{text!r} has no path: write it like file:/run/notice")
        return FileNotices(Path(rest))
    if kind == "signal":
        return _signal_source(rest)
    raise UnknownName("source of notices", text, NAMES)


def _present_cloud(metadata_url: str | None) -> NoticeSource | None:
    for make in CLOUDS.values():
        source = make(metadata_url)
        if source.present():
            return source
    return None


def _signal_source(text: str) -> SignalNotices:
    name, _, seconds = text.partition(":")
    wanted = f"SIG{(name or 'USR1').upper().removeprefix('SIG')}"
    try:
        number = signal.Signals[wanted]
    except KeyError:
        raise UnknownName("signal", wanted, signal.Signals.__members__) from None
    return SignalNotices(number, seconds=parse_seconds(seconds or "30s"))
