"""``deepvm memory-node``: options in, a serving node or the status of a running one out. Calls ``memnode``."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepvm.cli.render import JsonFlag, console, print_json, safe, table
from deepvm.errors import UsageError
from deepvm.units import format_bytes, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from deepvm.memnode import MemoryNode

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def command(
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Serve here; port 0 takes a free one.")
    ] = None,
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            "--advertise", metavar="HOST:PORT", help="Where clients reach it through NAT or a forwarded port."
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peers", metavar="HOST or NETWORK", help="Nodes it may fetch from [default: of its own network]."
        ),
    ] = None,
    capacity: Annotated[
        str | None, typer.Option("--capacity", metavar="SIZE", help="Memory for checkpoints, e.g. 8GB.")
    ] = None,
    buffers: Annotated[
        int, typer.Option("--buffers", min=1, help="Checkpoints of a run in memory, the one in progress included.")
    ] = 2,
    block: Annotated[str, typer.Option("--block", metavar="SIZE", help="Size of chunks and blocks.")] = "4MiB",
    spill: Annotated[
        Path | None, typer.Option("--spill", metavar="DIR", help="Also write every checkpoint here; serve it again.")
    ] = None,
    spill_keep: Annotated[
        int | None, typer.Option("--spill-keep", min=1, help="Checkpoints of a run kept there [default: --buffers].")
    ] = None,
    durable: Annotated[
        str | None, typer.Option("--durable", metavar="URL", help="Also write every checkpoint to this store.")
    ] = None,
    durable_keep: Annotated[
        int | None, typer.Option("--durable-keep", min=1, help="Checkpoints of a run kept there [default: all].")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="What clients must know; else DEEPVM_TOKEN.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="Certificate (PEM); with --status, to trust.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="The certificate's key (PEM).")] = None,
    metrics: Annotated[
        int | None, typer.Option("--metrics", metavar="PORT", min=0, max=65535, help="Prometheus metrics and /healthz.")
    ] = None,
    metrics_host: Annotated[str, typer.Option("--metrics-host", help="Where metrics are served.")] = "127.0.0.1",
    stop_within: Annotated[str, typer.Option("--stop-within", help="Deadline for uploads when stopping.")] = "10s",
    flush_within: Annotated[str, typer.Option("--flush-within", help="Deadline for writing on when stopping.")] = "30s",
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", help="Written with HOST:PORT once the node listens; a file or a pipe."),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="HOST:PORT", help="Show the status of a running node, and serve nothing."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Keep checkpoints in this machine's memory; SIGTERM stops it after the uploads in progress."""
    from deepvm.memnode import Limits, MemoryNode
    from deepvm.memnode.monitoring.log import Log
    from deepvm.protocol.credentials import read_token

    token = read_token(token_file)
    if status is not None:
        _show_status(status, token, tls_cert, as_json=json)
        return
    if listen is None or capacity is None:
        raise UsageError("a memory node needs --listen HOST:PORT and --capacity SIZE, or --status HOST:PORT")
    node = MemoryNode(
        log=Log.to_stderr(),
        listen=listen,
        advertise=tuple(advertise or ()),
        peers=tuple(peers or ()),
        capacity_bytes=parse_bytes(capacity),
        block_bytes=parse_bytes(block),
        buffers=buffers,
        spill=spill,
        spill_keep=spill_keep,
        durable=durable,
        durable_keep=durable_keep,
        token=token,
        tls_cert=tls_cert,
        tls_key=tls_key,
        metrics=None if metrics is None else f"{metrics_host}:{metrics}",
        limits=Limits(stop_s=parse_seconds(stop_within), flush_s=parse_seconds(flush_within)),
    )
    _serve(node, ready_file)


def _serve(node: MemoryNode, ready_file: Path | None) -> None:
    """Serve until a signal; a second one while stopping ends the node at once."""
    asked, again = threading.Event(), threading.Event()

    def on_signal(*_: object) -> None:
        (again if asked.is_set() else asked).set()

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        node.start()
        gc.freeze()  # scanning modules repeatedly would slow saves
        if ready_file is not None:
            _write_ready(ready_file, node.address)
        while not asked.wait(1):
            pass
        stopper = threading.Thread(target=node.stop, name="deepvm-stop", daemon=True)
        stopper.start()
        while stopper.is_alive() and not again.is_set():
            stopper.join(0.05)
    finally:
        if ready_file is not None:
            _remove_ready(ready_file)
        for number, handler in before.items():
            signal.signal(number, handler)
        if not asked.is_set():
            node.stop(now=True)


def _remove_ready(path: Path) -> None:
    if path.is_file():
        path.unlink(missing_ok=True)


def _write_ready(path: Path, address: str) -> None:
    """Write the address into a file, or into a pipe or device that is there already."""
    from deepvm.store.regular_file import write_private

    temporary = path.with_name(path.name + ".tmp")
    try:
        if path.exists() and not path.is_file():
            path.write_text(f"{address}\n", encoding="utf-8")
            return
        write_private(temporary, address)
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def _show_status(address: str, token: str | None, tls_cert: Path | None, *, as_json: bool) -> None:
    from deepvm.protocol.credentials import client_tls
    from deepvm.store.memory.store import MemoryStore

    with contextlib.closing(MemoryStore([address], token=token, tls=client_tls(tls_cert))) as store:
        found = store.status(address)
    if as_json:
        print_json(found)
        return
    rows = table(f"memory node {safe(address)}", "what", ">how much")
    for name, value in found.items():
        rows.add_row(*map(safe, _shown(name, value)))
    console.print(rows)


def _shown(name: str, value: Any) -> tuple[str, str]:
    shown = "" if value is None else str(value)
    if type(value) in (int, float):
        if name.endswith("_bytes") or name in ("bytes_in", "bytes_out"):
            name, shown = name.removesuffix("_bytes"), format_bytes(value)
        elif name.endswith("_s"):
            name, shown = name.removesuffix("_s"), format_seconds(value)
    return name.replace("_", " "), shown
