"""Notices of every source, from services on loopback that answer as the clouds' manuals say; and the watch."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import UnknownName, UsageError
from deepvm.runtime.notices import Notice, NoticeSource, Watch, open_source
from deepvm.runtime.notices.aws import AwsNotices
from deepvm.runtime.notices.azure import AzureNotices
from deepvm.runtime.notices.files import FileNotices, write_notice
from deepvm.runtime.notices.gcp import GcpNotices
from deepvm.runtime.notices.signals import SignalNotices
from deepvm.runtime.notices.sources import NoNotices
from tests.support.runtime.metadata_servers import AzureImds, Cloud, Ec2, Gce, azure_event, raw_server, running
from tests.support.waiting import wait_until

T = TypeVar("T", bound=Cloud)
WHOLE = 1_790_000_000.0  # 2026-09-21T14:13:20Z
TERMINATE = '{"action": "terminate", "time": "2026-09-21T14:13:20Z"}'
UNHASHABLE = '{"Events": [{"EventType": ["Preempt"], "Resources": ["worker_3"]}]}'
REBALANCE = '{"noticeTime": "2026-09-21T14:10:00Z"}'


@pytest.fixture
def started() -> Iterator[Callable[[T], T]]:
    with ExitStack() as stack:
        yield lambda cloud: stack.enter_context(running(cloud))


@pytest.fixture(params=[AwsNotices, GcpNotices, AzureNotices])
def make(request: pytest.FixtureRequest) -> Callable[[str], NoticeSource]:
    return request.param


# --- the same for every cloud -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"\x00\xff garbage",
        b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 3\r\n\r\n\xff\xfe\xfd",
        b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 9\r\n\r\n<html>hm\n",
        b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 9000\r\n\r\nTRU",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + b"[" * 2000,
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\nTRUE",
    ],
)
def test_garbage_announces_nothing(make: Callable[[str], NoticeSource], says: bytes) -> None:
    with raw_server(says) as url:
        assert make(url).poll() is None


def test_a_service_that_hangs_is_given_up(make: Callable[[str], NoticeSource]) -> None:
    with raw_server(None) as url:
        assert make(url).poll() is None


def test_a_service_that_is_gone_announces_nothing(make: Callable[[str], NoticeSource]) -> None:
    with raw_server(b"") as url:
        pass
    assert make(url).poll() is None


def test_no_proxy_of_the_environment_is_asked(
    make: Callable[[str], NoticeSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with running(Ec2()) as service, running(Ec2()) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        make(service.url).poll()
        assert service.asked
        assert not proxy.asked


@pytest.mark.parametrize("url", ["169.254.169.254", "https://127.0.0.1", "http://", "http://[::1", "http://host:port"])
def test_what_is_no_address_of_a_service_is_refused(make: Callable[[str], NoticeSource], url: str) -> None:
    with pytest.raises(UsageError, match=r"is not a valid URL .* http://169\.254\.169\.254"):
        make(url)


KEYS = ("action", "time", "noticeTime", "Events", "EventId", "EventType", "Resources", "EventStatus", "NotBefore")
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5)
    | st.sampled_from(["terminate", "Preempt", "Started", "worker_3", "2026-09-21T14:13:20Z", "Mon, 99 Foo 1 1:1:1"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3) | st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=15,
)  # fmt: skip
DOCUMENTS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8) | st.builds(
    lambda *events: {"Events": list(events)}, st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8)
)


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[Cloud, Cloud]]:
    with running(Ec2()) as ec2, running(AzureImds()) as imds:
        yield ec2, imds


@settings(max_examples=25, deadline=None)
@given(DOCUMENTS)
def test_no_document_makes_a_poll_fail(services: tuple[Cloud, Cloud], document: object) -> None:
    ec2, imds = services
    ec2.paths[Ec2.ACTION] = ec2.paths[Ec2.REBALANCE] = imds.paths[AzureImds.EVENTS] = json.dumps(document)
    for source in (AwsNotices(ec2.url), AzureNotices(imds.url)):
        notice = source.poll()
        assert notice is None or notice.at_s is None or math.isfinite(notice.at_s)


# --- AWS ----------------------------------------------------------------------------------------------------------


def test_ec2_tells_an_interruption_with_its_time(started: Callable[[T], T]) -> None:
    service = started(Ec2())
    source = AwsNotices(service.url)
    assert source.poll() is None
    assert service.asked[0] == "PUT /latest/api/token"
    for action in ("terminate", "stop", "hibernate"):
        service.paths[Ec2.ACTION] = TERMINATE.replace("terminate", action)
        assert source.poll() == Notice(action=action, at_s=WHOLE, source="aws")
    assert service.tokens_given == 1


def test_an_interruption_wins_over_a_rebalance_recommendation(started: Callable[[T], T]) -> None:
    service = started(Ec2())
    source = AwsNotices(service.url)
    service.paths[Ec2.REBALANCE] = REBALANCE
    assert source.poll() == Notice(action="rebalance", at_s=None, source="aws")
    service.paths[Ec2.ACTION] = TERMINATE
    assert source.poll() == Notice(action="terminate", at_s=WHOLE, source="aws")


def test_a_token_is_renewed_before_it_expires(started: Callable[[T], T], monkeypatch: pytest.MonkeyPatch) -> None:
    service = started(Ec2())
    service.paths[Ec2.ACTION] = TERMINATE
    source = AwsNotices(service.url, token_s=1000)
    assert source.poll() is not None
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 950)
    assert source.poll() is not None
    assert service.tokens_given == 2
    assert service.asked.count(f"GET {Ec2.ACTION}") == 2  # none of them was refused
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1050)
    assert source.poll() is not None
    assert service.tokens_given == 2


def test_a_token_that_is_refused_is_replaced_at_once(started: Callable[[T], T]) -> None:
    service = started(Ec2())
    service.paths[Ec2.ACTION] = TERMINATE
    source = AwsNotices(service.url)
    assert source.poll() is not None
    service.tokens.clear()
    assert source.poll() is not None
    assert service.asked[-3:] == [f"GET {Ec2.ACTION}", "PUT /latest/api/token", f"GET {Ec2.ACTION}"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "terminate",
        "[]",
        "null",
        '{"action": ["terminate"]}',
        '{"action": "rebalance", "time": "2026-09-21T14:13:20Z"}',
    ],
)
def test_what_is_no_interruption_hides_no_recommendation(started: Callable[[T], T], text: str) -> None:
    service = started(Ec2())
    service.paths |= {Ec2.ACTION: text, Ec2.REBALANCE: REBALANCE}
    assert AwsNotices(service.url).poll() == Notice(action="rebalance", at_s=None, source="aws")


@pytest.mark.parametrize("told", ["", "soon", "2026-99-21T14:13:20Z", "0001-01-01T00:00:00+23:59"])
def test_an_interruption_without_a_readable_time_is_one_all_the_same(started: Callable[[T], T], told: str) -> None:
    service = started(Ec2())
    service.paths[Ec2.ACTION] = TERMINATE.replace("2026-09-21T14:13:20Z", told)
    notice = AwsNotices(service.url).poll()
    assert notice is not None
    assert notice.action == "terminate"


# --- Google Cloud -------------------------------------------------------------------------------------------------


def test_a_preemption_ends_half_a_minute_after_it_was_seen_first(started: Callable[[T], T]) -> None:
    service = started(Gce())
    source = GcpNotices(service.url)
    assert source.poll() is None
    service.paths[Gce.PREEMPTED] = "TRUE"
    before_s = time.time()
    notice = source.poll()
    assert notice is not None
    assert notice.action == "terminate"
    assert notice.at_s is not None
    assert before_s + 30 <= notice.at_s <= time.time() + 30
    del service.paths[Gce.PREEMPTED]  # an answer that fails in between moves nothing
    assert source.poll() is None
    service.paths[Gce.PREEMPTED] = "TRUE"
    assert source.poll() == notice


@pytest.mark.parametrize(
    ("event", "notice"),
    [
        ("NONE", None),
        ("MIGRATE_ON_HOST_MAINTENANCE", None),
        ("TERMINATE_ON_HOST_MAINTENANCE", Notice(action="stop", at_s=None, source="gcp")),
    ],
)
def test_maintenance_counts_where_it_ends_the_machine(
    started: Callable[[T], T], event: str, notice: Notice | None
) -> None:
    service = started(Gce())
    service.paths[Gce.MAINTENANCE] = event
    assert GcpNotices(service.url).poll() == notice


def test_an_answer_of_somebody_else_is_not_taken_for_googles(started: Callable[[T], T]) -> None:
    service = Gce()
    service.flavor = None
    started(service).paths[Gce.PREEMPTED] = "TRUE"
    assert GcpNotices(service.url).poll() is None


# --- Azure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "action"),
    [("Preempt", "terminate"), ("Terminate", "terminate"), ("Reboot", "stop"), ("Redeploy", "stop"), ("Freeze", None)],
)
def test_azure_events_end_a_machine_or_only_pause_it(started: Callable[[T], T], kind: str, action: str | None) -> None:
    service = started(AzureImds())
    source = AzureNotices(service.url)
    assert source.poll() is None
    service.announce(azure_event(kind, at_s=WHOLE))
    notice = source.poll()
    assert (None if notice is None else (notice.action, notice.at_s)) == (action and (action, WHOLE))


def test_events_of_other_machines_do_not_count(started: Callable[[T], T]) -> None:
    service = started(AzureImds())
    source = AzureNotices(service.url)
    service.announce(azure_event("Preempt", at_s=WHOLE, resources=("worker_2", "worker_33")))
    assert source.poll() is None
    service.announce(azure_event("Preempt", at_s=WHOLE, resources=("worker_2", "WORKER_3")))
    assert source.poll() is not None


def test_an_event_that_has_begun_keeps_its_time(started: Callable[[T], T]) -> None:
    service = started(AzureImds())
    source = AzureNotices(service.url)
    service.announce(azure_event("Preempt", at_s=WHOLE))
    announced = source.poll()
    service.announce(azure_event("Preempt", at_s=None))
    assert source.poll() == announced


def test_an_event_that_had_begun_when_it_was_seen_ends_the_machine_now(started: Callable[[T], T]) -> None:
    service = started(AzureImds())
    source = AzureNotices(service.url)
    service.announce(azure_event("Preempt", at_s=None))
    notice = source.poll()
    assert notice is not None
    assert notice.seconds_left(time.time()) == 0
    assert source.poll() == notice


def test_of_several_events_the_first_counts(started: Callable[[T], T]) -> None:
    service = started(AzureImds())
    service.announce(
        azure_event("Reboot", at_s=WHOLE + 600, EventId="a"),
        azure_event("Preempt", at_s=WHOLE, EventId="b"),
        azure_event("Redeploy", at_s=WHOLE, EventId="c", NotBefore="some day"),
    )
    assert AzureNotices(service.url).poll() == Notice(action="terminate", at_s=WHOLE, source="azure")


@pytest.mark.parametrize(
    "text", ["[]", '{"Events": 5}', '{"Events": ["Preempt", {"EventType": "Preempt"}]}', UNHASHABLE]
)
def test_other_documents_announce_nothing(started: Callable[[T], T], text: str) -> None:
    service = started(AzureImds())
    service.paths[AzureImds.EVENTS] = text
    assert AzureNotices(service.url).poll() is None


# --- files and signals --------------------------------------------------------------------------------------------


def test_a_file_is_a_notice_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = FileNotices(path)
    assert source.poll() is None
    for rubbish in (b"\xff", b"[]", b"{", b'{"at_s": NaN}', b'{"action": "dance"}', b'{"at_s": "soon"}'):
        path.write_bytes(rubbish)
        assert source.poll() is None
    path.write_text("")
    assert source.poll() == Notice(action="terminate", at_s=None, source=f"file {path}")
    write_notice(path, seconds_left=20)
    notice = source.poll()
    assert notice is not None
    assert notice.seconds_left(time.time()) == pytest.approx(20, abs=5)


def test_a_signal_is_a_notice_and_is_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    source = SignalNotices(seconds=30)
    try:
        assert source.poll() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        notice = source.poll()
        assert notice is not None
        assert notice.source == "signal SIGUSR1"
        assert notice.seconds_left(time.time()) == pytest.approx(30, abs=5)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert source.poll() == notice  # said twice, it ends no later
    finally:
        source.close()
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("text", ["signal:KILL:5s", "signal:USR1:never", "signal:USR1:-1s"])
def test_signals_that_cannot_serve_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        open_source(text)


# --- by name ------------------------------------------------------------------------------------------------------


def test_sources_have_names(tmp_path: Path) -> None:
    assert isinstance(open_source("aws"), AwsNotices)
    assert isinstance(open_source("gcp"), GcpNotices)
    assert isinstance(open_source("azure"), AzureNotices)
    assert isinstance(open_source("none"), NoNotices)
    write_notice(tmp_path / "a:b", seconds_left=None)
    assert open_source(f"file:{tmp_path}/a:b").poll() is not None
    source = open_source("signal:usr2:90s")
    assert isinstance(source, SignalNotices)
    source.close()


@pytest.mark.parametrize("text", ["", "amazon", "aws:x", "awz", "signal:USR9:30s", "none:1"])
def test_other_names_are_unknown(text: str) -> None:
    with pytest.raises(UnknownName):
        open_source(text)


def test_a_file_needs_a_path() -> None:
    with pytest.raises(UsageError, match="has no path"):
        open_source("file:")


@pytest.mark.parametrize(("service", "kind"), [(Ec2, AwsNotices), (Gce, GcpNotices), (AzureImds, AzureNotices)])
def test_auto_finds_the_cloud_that_answers(
    started: Callable[[T], T], monkeypatch: pytest.MonkeyPatch, service: type[Cloud], kind: type[NoticeSource]
) -> None:
    monkeypatch.setenv("DEEPVM_METADATA_URL", started(service()).url)
    assert isinstance(open_source("auto"), kind)


def test_auto_is_none_where_no_cloud_answers() -> None:
    with raw_server(b"") as url:
        assert isinstance(open_source("auto", metadata_url=url), NoNotices)
    assert isinstance(open_source("auto", metadata_url=url), NoNotices)


def test_sources_and_the_watch_load_nothing_heavy() -> None:
    code = "import sys, deepvm.runtime.notices; print(*{'torch', 'numpy', 'boto3', 'requests'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


# --- the watch ----------------------------------------------------------------------------------------------------


class Heard:
    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self._changed = threading.Condition()

    def __call__(self, notice: Notice) -> None:
        with self._changed:
            self.notices.append(notice)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Notice]:
        with self._changed:
            self._changed.wait_for(lambda: len(self.notices) >= count, timeout=20)
            return list(self.notices)


def test_each_notice_is_reported_once(started: Callable[[T], T], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AwsNotices, "interval_s", 0.02)
    service, heard = started(Ec2()), Heard()
    with Watch(AwsNotices(service.url), heard):
        service.paths[Ec2.REBALANCE] = REBALANCE
        heard.wait_for(1)
        service.paths[Ec2.ACTION] = TERMINATE
        heard.wait_for(2)
        del service.paths[Ec2.ACTION]  # the recommendation again: nothing new
        _until_asked_again(service)
        service.paths[Ec2.ACTION] = TERMINATE.replace("14:13:20", "14:12:50")
        heard.wait_for(3)
        _until_asked_again(service)
    told = [(notice.action, notice.at_s) for notice in heard.notices]
    assert told == [("rebalance", None), ("terminate", WHOLE), ("terminate", WHOLE - 30)]


def test_a_watch_outlives_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GcpNotices, "interval_s", 0.02)
    heard = Heard()
    first = Gce()
    with running(first):
        watch = Watch(GcpNotices(first.url), heard).start()
        _until_asked_again(first)
    try:
        second = _Again(first.server_address[1])
        second.paths[Gce.PREEMPTED] = "TRUE"
        with running(second):
            assert [notice.action for notice in heard.wait_for(1)] == ["terminate"]
    finally:
        assert watch.close()


def test_a_handler_that_fails_does_not_end_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, heard = tmp_path / "notice", Heard()

    def handle(notice: Notice) -> None:
        heard(notice)
        if len(heard.notices) == 1:
            raise RuntimeError("the first is too much")

    with Watch(FileNotices(path), handle):
        write_notice(path, seconds_left=None)
        heard.wait_for(1)
        write_notice(path, seconds_left=5)
        assert len(heard.wait_for(2)) == 2
    assert "the first is too much" in caplog.text


class Stuck:
    interval_s = 0.02

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def poll(self) -> Notice | None:
        self.asked.set()
        self.released.wait(60)
        return Notice(action="terminate", at_s=None, source="stuck")


def test_a_watch_closes_within_its_deadline_while_its_source_hangs() -> None:
    source, heard = Stuck(), Heard()
    watch = Watch(source, heard).start()
    assert source.asked.wait(20)
    assert not watch.close(timeout_s=0.1)
    source.released.set()
    assert watch.close(timeout_s=20)
    assert heard.notices == []  # what comes after the end is not told


def test_a_handler_may_close_its_watch(tmp_path: Path) -> None:
    write_notice(tmp_path / "notice", seconds_left=None)
    closed, ready = threading.Event(), threading.Event()

    def handle(_: Notice) -> None:
        ready.wait(20)
        watch.close()
        closed.set()

    watch = Watch(FileNotices(tmp_path / "notice"), handle).start()
    ready.set()
    assert closed.wait(20)
    assert watch.close(timeout_s=20)


class _Again(Gce):
    """At the port of one that is gone."""

    def __init__(self, port: int) -> None:
        self._wanted = port
        super().__init__()

    def server_bind(self) -> None:
        self.server_address = ("127.0.0.1", self._wanted)
        super().server_bind()


def _until_asked_again(service: Cloud, times: int = 6) -> None:
    enough = len(service.asked) + times
    wait_until(lambda: len(service.asked) >= enough, f"{times} more questions")


def test_a_notice_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="at_s of a notice is nan: it must be finite"):
        Notice(action="terminate", at_s=math.nan, source="aws")
    with pytest.raises(UsageError, match="unknown action of a notice 'sleep': it must be one of "):
        Notice(action="sleep", at_s=None, source="aws")  # type: ignore[arg-type]
    assert Notice(action="stop", at_s=None, source="aws").seconds_left(5.0) is None
    assert [Notice(action="stop", at_s=9.0, source="aws").seconds_left(now_s) for now_s in (5.0, 10.0)] == [4.0, 0.0]
