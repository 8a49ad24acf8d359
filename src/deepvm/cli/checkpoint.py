"""``deepvm checkpoint``: list, show, verify, export, copy and remove checkpoints. Renders what any store returns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from deepvm import variables
from deepvm.cli.render import JsonFlag, console, print_json, safe, stderr, table
from deepvm.errors import Corrupt, NotFound, StoreError, UsageError
from deepvm.json_fields import json_fields
from deepvm.store import Manifest, Store, open_store
from deepvm.units import format_bytes, format_seconds

app = typer.Typer(help="Inspect any store of checkpoints: ls, show, verify, export, pull, rm.", no_args_is_help=True)

Url = Annotated[str, typer.Argument(help="memory://HOST:PORT, file:///DIR, s3://BUCKET/PREFIX, or a directory.")]
Run = Annotated[str | None, typer.Option("--run", help="The run [the only one].")]
Step = Annotated[int | None, typer.Option("--step", help="The step [the newest].", min=0)]
TokenFile = Annotated[Path | None, typer.Option(help="File with the memory nodes' token [DEEPVM_TOKEN].")]

_TENSORS_SHOWN = 40
WITNESS = ".witness"  # suffix of a run that has the proofs of another run's steps


@app.command("ls")
def ls(url: Url, run: Run = None, token_file: TokenFile = None, json: JsonFlag = False) -> None:
    """List the checkpoints of a store, oldest first."""
    with _opened(url, token_file) as store:
        names = [run] if run is not None else store.runs()
        found = [(name, step, _manifest_or_problem(store, name, step)) for name in names for step in store.steps(name)]
    if json:
        print_json({"url": url, "checkpoints": [_overview(*row) for row in found]})
        return
    if not found:
        console.print(f"no checkpoints in {safe(url)}", soft_wrap=True)
        return
    rows = table(None, "run", ">step", ">size", "saved", ">ranks")
    for name, step, manifest in found:
        if isinstance(manifest, str):
            rows.add_row(safe(name), str(step), "", f"[red]{safe(manifest)}[/]", "")
        else:
            size = format_bytes(manifest.size_bytes)
            rows.add_row(safe(name), str(step), size, _when(manifest.created_s), str(manifest.world_size))
    console.print(rows)


@app.command()
def show(url: Url, run: Run = None, step: Step = None, token_file: TokenFile = None, json: JsonFlag = False) -> None:
    """Show one checkpoint: its tensors, its state and its facts."""
    from deepvm.store.safetensors import read_header

    with _opened(url, token_file) as store:
        manifest = store.manifest(*_chosen(store, run, step))
        header = read_header(store, manifest)
    if json:
        tensors = [json_fields(tensor, "name dtype shape offset size_bytes") for tensor in header.tensors]
        print_json({**_overview(manifest.run, manifest.step, manifest), "tensors": tensors})
        return
    console.print(f"[bold]{safe(manifest.run)}[/] step {manifest.step}: {format_bytes(manifest.size_bytes)}", end="")
    console.print(
        f" in {len(manifest.digests)} chunks, saved {_when(manifest.created_s)} by {manifest.world_size} ranks"
    )
    for name, value in manifest.facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        console.print(f"[cyan]{safe(name)}[/]: {safe(shown)}", soft_wrap=True)
    if manifest.nodes:
        nodes = safe(", ".join(manifest.nodes))
        console.print(f"[cyan]nodes[/]: {nodes}, {manifest.replicas} copies", soft_wrap=True)
    rows = table(f"\n{len(header.tensors)} tensors", "tensor", "type", "shape", ">size")
    for tensor in header.tensors[:_TENSORS_SHOWN]:
        shape = " × ".join(map(str, tensor.shape)) or "scalar"
        rows.add_row(safe(tensor.name), safe(tensor.dtype), shape, format_bytes(tensor.size_bytes))
    console.print(rows)
    if len(header.tensors) > _TENSORS_SHOWN:
        console.print(f"[dim]... and {len(header.tensors) - _TENSORS_SHOWN:,} more: --json shows all[/]")


@app.command()
def verify(
    url: Url,
    run: Run = None,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Every step of the run, or of all runs.")] = False,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:FUNCTION", help="Make the next step again and compare; the function builds the state."
        ),
    ] = None,
    token_file: TokenFile = None,
    json: JsonFlag = False,
) -> None:
    """Read every byte and compare it with its checksum. Exit code 1 if anything is bad."""
    from deepvm.store.verify import Verification
    from deepvm.store.verify import verify as verify_one

    if every and step is not None:
        raise UsageError("--all verifies every step: leave out --step, or --all")
    if every and replay is not None:
        raise UsageError("--replay proves one step: leave out --all, or --replay")
    good = True
    documents: list[dict[str, Any]] = []
    with _opened(url, token_file) as store:
        for name, number in _all_chosen(store, run, step, every=every):
            try:
                with _bar("verifying", store.manifest(name, number)) as progress:
                    found: Verification | str = verify_one(store, name, number, progress=progress)
            except StoreError as error:
                if not every and not isinstance(error, Corrupt):
                    raise
                found = str(error)
            documents.append(_verified(name, number, found))
            if replay is not None and documents[-1]["good"]:
                documents[-1] |= _replayed(store, name, number, replay)
            good &= documents[-1]["good"]
            if not json:
                _print_verified(url, documents[-1])
    if json:
        print_json({"url": url, "good": good, "checkpoints": documents})
    if not good:
        raise typer.Exit(1)


@app.command()
def export(
    url: Url,
    file: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    run: Run = None,
    step: Step = None,
    token_file: TokenFile = None,
    json: JsonFlag = False,
) -> None:
    """Write a checkpoint as a plain safetensors file."""
    from deepvm.store.verify import export as export_one

    with _opened(url, token_file) as store:
        chosen = store.manifest(*_chosen(store, run, step))
        with _bar("exporting", chosen) as progress:
            export_one(store, chosen.run, chosen.step, file, progress=progress)
    _done(json, f"written to {file}", **json_fields(chosen, "run step size_bytes"), file=str(file))


@app.command()
def pull(
    url: Url,
    target: Annotated[str, typer.Argument(help="The store to copy to: a URL, or a directory.")],
    run: Run = None,
    step: Step = None,
    token_file: TokenFile = None,
    json: JsonFlag = False,
) -> None:
    """Copy a checkpoint into another store, and verify it on the way."""
    from deepvm.store.verify import copy

    with _opened(url, token_file) as source, _opened(target, token_file) as destination:
        chosen = source.manifest(*_chosen(source, run, step))
        with _bar("copying", chosen) as progress:
            copy(source, destination, chosen.run, chosen.step, progress=progress)
    text = f"{chosen.run} step {chosen.step} is in {target}"
    _done(json, text, **json_fields(chosen, "run step size_bytes"), target=target)


@app.command()
def rm(
    url: Url,
    run: Annotated[str, typer.Option("--run", help="The run.")],
    step: Annotated[int, typer.Option("--step", help="The step.", min=0)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    token_file: TokenFile = None,
    json: JsonFlag = False,
) -> None:
    """Remove a checkpoint for good."""
    with _opened(url, token_file) as store:
        if step not in store.steps(run):
            raise NotFound(f"{url} has no step {step} of run {run}: 'deepvm checkpoint ls' shows what it has")
        if not yes:
            if json:
                raise UsageError("--json does not ask: add --yes to remove the checkpoint")
            typer.confirm(f"Remove step {step} of run {run} from {url} for good?", abort=True, err=True)
        store.delete(run, step)
    _done(json, f"{run} step {step} is removed", run=run, step=step, removed=True)


# --- what the commands share --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(url: str, token_file: Path | None) -> Iterator[Store]:
    from deepvm.protocol.credentials import read_token

    token = read_token(token_file)
    store = open_store(url, token=token, key=os.environ.get(variables.RUN_KEY) or None)
    try:
        yield store
    finally:
        store.close()


def _chosen_run(store: Store, run: str | None) -> str:
    if run is not None:
        return run
    runs = [name for name in store.runs() if not name.endswith(WITNESS)]
    if not runs:
        raise NotFound(f"{store.url} has no checkpoints")
    if len(runs) > 1:
        shown = ", ".join(runs[:8]) + (" ..." if len(runs) > 8 else "")
        raise UsageError(f"{store.url} has {len(runs)} runs: choose one with --run ({shown})")
    return runs[0]


def _chosen(store: Store, run: str | None, step: int | None) -> tuple[str, int]:
    name = _chosen_run(store, run)
    if step is not None:
        return name, step
    steps = store.steps(name)
    if not steps:
        raise NotFound(f"{store.url} has no checkpoints of run {name}")
    return name, steps[-1]


def _all_chosen(store: Store, run: str | None, step: int | None, *, every: bool) -> list[tuple[str, int]]:
    if not every:
        return [_chosen(store, run, step)]
    names = [run] if run is not None else store.runs()
    found = [(name, number) for name in names for number in store.steps(name)]
    if not found:
        raise NotFound(f"{store.url} has no checkpoints" + ("" if run is None else f" of run {run}"))
    return found


def _manifest_or_problem(store: Store, run: str, step: int) -> Manifest | str:
    try:
        return store.manifest(run, step)
    except StoreError as error:  # broken or deleted meanwhile: the others are listed
        return str(error)


def _overview(run: str, step: int, manifest: Manifest | str) -> dict[str, Any]:
    if isinstance(manifest, str):
        return {"run": run, "step": step, "problem": manifest}
    return {
        "run": run,
        "step": step,
        **json_fields(manifest, "size_bytes chunk_bytes"),
        "chunks": len(manifest.digests),
        **json_fields(manifest, "created_s world_size nodes replicas"),
        "facts": dict(manifest.facts),
    }


def _verified(run: str, step: int, found: Any) -> dict[str, Any]:
    if isinstance(found, str):  # the manifest cannot be read
        return {"run": run, "step": step, "good": False, "problem": found, "chunks_bad": []}
    return {
        "run": run,
        "step": step,
        "good": found.good,
        "problem": found.header_problem,
        **json_fields(found, "size_bytes chunks"),
        "chunks_bad": [json_fields(bad, "chunk offset problem") for bad in found.chunks_bad],
        "seconds": found.seconds,
    }


def _replayed(store: Store, run: str, step: int, spec: str) -> dict[str, Any]:
    from deepvm.cli.replay import replay

    problem = replay(store, run, step, spec)
    return {"good": problem is None, "replayed": problem is None, "problem": problem}


def _print_verified(url: str, document: dict[str, Any]) -> None:
    name = f"{safe(document['run'])} step {document['step']}"
    if document["good"]:
        rate = document["size_bytes"] / max(document["seconds"], 1e-9)
        console.print(
            f"[green]good[/] {name}: {format_bytes(document['size_bytes'])} in {document['chunks']} chunks, "
            f"{format_seconds(document['seconds'])}, {format_bytes(rate)}/s"
            + (", replayed and identical" if document.get("replayed") else ""),
            soft_wrap=True,
        )
        return
    console.print(f"[bold red]bad[/]  {name}")
    for bad in document["chunks_bad"]:
        console.print(f"  chunk {bad['chunk']} at byte {bad['offset']}: {safe(bad['problem'])}", soft_wrap=True)
    if document["problem"]:
        console.print(f"  {safe(document['problem'])}", soft_wrap=True)
    if "replayed" in document:  # its bytes are good
        return
    remove = f"deepvm checkpoint rm {url} --run {document['run']} --step {document['step']}"
    console.print(f"  pull a good copy from another store, or remove this one: {safe(remove)}", soft_wrap=True)


@contextlib.contextmanager
def _bar(verb: str, manifest: Manifest) -> Iterator[Any]:
    """Show a progress bar on stderr once a second has passed."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
    task = bar.add_task(safe(f"{verb} {manifest.run} step {manifest.step}"), total=manifest.size_bytes)

    def advance(count: int) -> None:
        bar.advance(task, count)
        if not bar.live.is_started and (bar.tasks[0].elapsed or 0) > 1:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


def _done(as_json: bool, text: str, **document: object) -> None:
    if as_json:
        print_json(document)
    else:
        console.print(safe(text), soft_wrap=True)


def _when(created_s: float) -> str:
    return datetime.fromtimestamp(created_s, timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S")
