"""An update brings what is new and tells what changed; a failed one leaves the last good catalogue as it was."""

import dataclasses
import os
import threading
import time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deepvm.catalog import Market, files, library
from deepvm.catalog import update as updates
from deepvm.catalog.update import compare, update
from deepvm.errors import DeepvmError, SourceFailed, UnknownName, UsageError

HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"
ROWS = ("c5.xlarge,,,4,8,,0.17,0.07,us-east-1,a", "m5.xlarge,,,4,16,,0.2,0.09,us-east-1,a")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests += 1
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body) + self.server.missing))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_):
        pass


class Source(ThreadingHTTPServer):
    daemon_threads = True
    status, missing, requests = 200, 0, 0
    body = b""

    def rows(self, *rows):
        self.body = "\n".join((HEADER, *rows)).encode()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/vms.csv"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    monkeypatch.setattr("deepvm.catalog.sources.download.time.sleep", lambda _: None)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Source(("127.0.0.1", 0), Handler)
    server.rows(*ROWS)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def run(source, **options):
    return update("skypilot", **{"name": "sky", "url": source.url, **options})


def test_a_first_update_keeps_what_it_read(source, tmp_path):
    told = []
    result = run(source, progress=told.append)
    assert result.fresh
    assert result.changes is None
    assert result.report.kept == 2
    assert result.path == tmp_path / "catalogs" / "sky.json"
    assert told
    kept = library.load("sky")
    assert sorted(kept.index_by_name) == ["c5.xlarge", "m5.xlarge"]
    assert kept.prices_seen[0] == datetime.now(timezone.utc).date()
    assert os.listdir(result.path.parent) == ["sky.json"]


def test_a_young_catalogue_is_not_read_again_unless_forced(source):
    run(source)
    again = run(source)
    assert not again.fresh
    assert 0 <= again.age_s < 60
    assert source.requests == 1
    assert run(source, force=True).fresh
    assert source.requests == 2


def test_an_old_catalogue_is_read_again(source):
    path = run(source).path
    os.utime(path, (time.time() - 3700,) * 2)
    assert run(source).fresh
    os.utime(path, (time.time() + 3700,) * 2)  # a clock that was wrong must not keep it young for ever
    assert run(source).fresh


def test_a_young_catalogue_of_something_else_is_no_answer(source):
    run(source)
    assert run(source, region="us-east-1").fresh
    assert library.load("sky").description.startswith("SkyPilot's catalogue of aws in us-east-1")


def test_without_a_name_a_catalogue_is_called_after_where_it_is_from(source, tmp_path):
    assert update("skypilot", url=source.url).catalog.name == "skypilot-aws"
    assert update("skypilot", url=source.url, region="us-east-1").catalog.name == "skypilot-aws-us-east-1"
    source.rows("n1,,,4,8,,0.1,,East Coast (NY2),")
    assert update("skypilot", url=source.url, provider="paperspace", region="East Coast (NY2)").catalog.name == (
        "skypilot-paperspace-East-Coast-NY2-"
    )
    file = tmp_path / "vms.csv"
    file.write_bytes(source.body)
    assert updates.import_file(file, provider="gcp").catalog.name == "skypilot-gcp"
    assert {"skypilot-aws", "skypilot-aws-us-east-1", "skypilot-gcp"} <= set(library.names())


def test_changes_are_listed(source):
    run(source)
    source.rows("c5.xlarge,,,4,8,,0.17,0.14,us-east-1,a", "r5.xlarge,,,4,32,,0.25,0.1,us-east-1,b")
    changes = run(source, force=True).changes
    (move,) = changes.moves
    assert (move.instance, move.zone, move.market) == ("c5.xlarge", "a", Market.SPOT)
    assert (move.usd_before, move.usd_after, round(move.ratio, 6)) == (0.07, 0.14, 2)
    assert (changes.added, changes.removed) == (("r5.xlarge",), ("m5.xlarge",))
    assert (changes.offers_before, changes.offers_after) == (4, 4)


def fail_to_write(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "breaking",
    [
        lambda s, m: setattr(s, "status", 503),
        lambda s, m: setattr(s, "status", 403),
        lambda s, m: setattr(s, "body", b""),
        lambda s, m: setattr(s, "body", b"<html>rate limited</html>"),
        lambda s, m: s.rows(),
        lambda s, m: s.rows("c5.xlarge,,,4,8,,,,us-east-1,a"),
        lambda s, m: setattr(s, "missing", 100),
        lambda s, m: m.setattr(files.os, "fsync", fail_to_write),
        lambda s, m: m.setattr(files.os, "replace", fail_to_write),
        lambda s, m: m.setattr(updates.files, "dumps", lambda _: '{"format": "deepvm-catalog/1", "na'),
        lambda s, m: m.setattr(updates.files, "dumps", lambda _: "\0" * 100),
    ],
    ids=[
        "unavailable", "denied", "empty", "no CSV", "no rows", "no prices", "broken off", "disk full", "no rename",
        "torn write", "zeroed write",
    ],
)  # fmt: skip
def test_a_failed_update_leaves_the_last_good_catalogue(source, monkeypatch, breaking):
    path = run(source).path
    before, when = path.read_bytes(), path.stat().st_mtime_ns
    with monkeypatch.context() as context:
        breaking(source, context)
        with pytest.raises(SourceFailed, match=r"the catalogue 'sky' stays as it was \(20"):
            run(source, force=True)
    assert path.read_bytes() == before
    assert path.stat().st_mtime_ns == when
    assert os.listdir(path.parent) == ["sky.json"]


def test_an_interrupt_in_the_middle_leaves_the_last_good_catalogue(source, monkeypatch):
    path = run(source).path
    before = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(updates.files, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            updates.write_checked(dataclasses.replace(library.load("paper-virtual"), name="sky"), path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["sky.json"]


def test_an_unsound_catalogue_does_not_take_the_place_of_a_sound_one(source):
    path = run(source).path
    before = path.read_bytes()
    paper = library.load("paper-virtual")
    empty = dataclasses.replace(paper, name="sky", prices={})
    with pytest.raises(SourceFailed, match="has errors: no prices at all"):
        updates.write_checked(empty, path)
    assert path.read_bytes() == before


def test_a_first_update_that_fails_leaves_nothing(source, tmp_path):
    source.status = 500
    with pytest.raises(SourceFailed) as caught:
        run(source)
    assert "stays" not in str(caught.value)
    assert not list(tmp_path.rglob("*sky*"))


def test_a_broken_kept_file_is_replaced(source, tmp_path):
    path = tmp_path / "catalogs" / "sky.json"
    path.parent.mkdir()
    path.write_text("{")
    assert run(source).changes is None
    assert library.load("sky").name == "sky"


def test_a_folder_that_cannot_be_written_is_reported(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path / "file"))
    with pytest.raises(SourceFailed, match="could not be written"):
        run(source)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "told"),
    [
        (["azure"], {}, UnknownName, "no source of catalogues is called 'azure'"),
        (["aws"], {}, UsageError, "--region"),
        (["aws"], {"region": "us-east-1", "url": "http://x/"}, UsageError, "--url"),
        (["skypilot"], {"url": "file:///etc/passwd"}, UsageError, "not a web address"),
        (["skypilot"], {"name": "aws-2026-08"}, UsageError, "built in"),
        (["skypilot"], {"name": "../x"}, UsageError, "not a valid catalogue name"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_read(source, arguments, options, error, told):
    with pytest.raises(error) as caught:
        update(*arguments, **{"name": "sky", **options})
    assert told in str(caught.value)
    assert isinstance(caught.value, DeepvmError)
    assert source.requests == 0


def test_a_catalogue_differs_not_from_itself():
    catalog = library.load("aws-2026-08")
    changes = compare(catalog, catalog)
    assert (changes.moves, changes.added, changes.removed) == ((), (), ())
    assert changes.offers_before == changes.offers_after == 82
