"""A download from a real server on loopback: passing faults are tried again, others told, limits hold."""

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deepvm.catalog.sources.download import download, public_address
from deepvm.errors import SourceFailed, UsageError


class Scripted(ThreadingHTTPServer):
    """Answers requests with the steps of ``script``, one after the other, the last for ever."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = []
        self.requests = 0
        self.ended = threading.Event()

    def url(self, path="/vms.csv"):
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        step = self.server.script[min(self.server.requests, len(self.server.script) - 1)]
        self.server.requests += 1
        with contextlib.suppress(OSError):
            step(self)

    def log_message(self, *_):
        pass


def answer(status=200, body=b"", length=None, **headers):
    def step(handler):
        handler.send_response(status)
        if length != "untold":
            handler.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return step


def silence(handler):
    handler.server.ended.wait(60)


def dribble(handler):
    answer(length=100)(handler)
    while not handler.server.ended.wait(0.1):
        handler.wfile.write(b"x")


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    scripted = Scripted()
    thread = threading.Thread(target=scripted.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield scripted
    scripted.ended.set()
    scripted.shutdown()
    thread.join(timeout=10)
    scripted.server_close()


def get(url, **changes):
    return download(url, **{"max_bytes": 1000, "timeout_s": 2, "backoff_s": 0.01, **changes})


def test_the_body_arrives_whole(server):
    server.script = [answer(body=b"hello")]
    told = []
    assert get(server.url(), progress=told.append) == b"hello"
    assert told == [f"downloading {server.url()}"]


def test_a_fault_that_passes_is_tried_again(server):
    server.script = [answer(503), answer(429), answer(body=b"at last")]
    assert get(server.url()) == b"at last"


def test_a_fault_that_stays_is_reported_after_three_attempts(server):
    server.script = [answer(503)]
    with pytest.raises(SourceFailed, match="503 Service Unavailable"):
        get(server.url())
    assert server.requests == 3


def test_a_refusal_is_final(server):
    server.script = [answer(404)]
    with pytest.raises(SourceFailed, match="404 Not Found"):
        get(server.url())
    assert server.requests == 1


def test_a_connection_that_breaks_off_gives_no_half_file(server):
    server.script = [answer(body=b"half", length=100)]
    with pytest.raises(SourceFailed, match="broke off in the middle"):
        get(server.url())


@pytest.mark.parametrize("length", [None, "untold"])
def test_more_than_the_limit_is_not_read(server, length):
    server.script = [answer(body=b"x" * 2000, length=length)]
    with pytest.raises(SourceFailed):
        get(server.url())


@pytest.mark.parametrize("slow", [silence, dribble])
def test_a_server_that_is_slow_is_given_up_at_the_deadline(server, slow):
    server.script = [slow]
    with pytest.raises(SourceFailed, match="in time"):
        get(server.url(), timeout_s=0.2, deadline_s=0.5)


def test_an_address_without_a_server_is_reported():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(SourceFailed, match=r"check the address and the network"):
        get(f"http://127.0.0.1:{port}/vms.csv")


def test_a_redirection_within_the_web_is_followed(server):
    server.script = [answer(302, Location="/elsewhere"), answer(body=b"moved")]
    assert get(server.url()) == b"moved"


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/x"])
def test_a_redirection_out_of_the_web_is_not(server, target):
    server.script = [answer(302, Location=target)]
    with pytest.raises((SourceFailed, UsageError)):
        get(server.url())
    assert server.requests <= 3


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://host/x", "vms.csv", "http://", "http://[::1", "http://a b/"]
)
def test_only_web_addresses_are_asked(url):
    with pytest.raises(UsageError, match="write it like https"):
        get(url)


def test_passwords_and_tokens_are_never_shown(server):
    server.script = [answer(500)]
    address = server.url().replace("//", "//me:hunter2@") + "?token=hunter3"
    with pytest.raises(SourceFailed) as caught:
        get(address)
    assert "hunter" not in str(caught.value)
    assert public_address("https://me:pw@host:8443/a/vms.csv?k=v#f") == "https://host:8443/a/vms.csv"


def test_an_answer_that_is_not_http_is_named_by_its_kind(server):
    server.script = [lambda handler: handler.wfile.write(b"what?\r\n\r\n")]
    with pytest.raises(SourceFailed, match="BadStatusLine"):
        get(server.url())
