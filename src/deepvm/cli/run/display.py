"""Views of a run -> a table that is redrawn in a terminal, or plain lines elsewhere."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deepvm.errors import printable
from deepvm.events import Event
from deepvm.runtime.log_tail import Tail, script_output
from deepvm.runtime.supervise.run_state import MachineView, View
from deepvm.units import format_seconds

REDRAW_S = 0.1
PLAIN_S = 5.0  # between two lines of progress
MOST_LINES, LINES_S = 100, 1.0  # of the script's output in that time: a terminal takes no more
MOST_WIDE = 2_000  # characters of one of these lines
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")  # colours, titles, cursors
_LOUD = {"warning": "yellow", "worker-failed": "bold red"}
_COLOURS = {
    "training": "green",
    "running": "cyan",
    "up": "cyan",
    "waiting": "cyan",
    "asked": "dim",
    "notice": "yellow",
    "down": "red",
}


class Display:
    """Call it with every view; ``close`` when the run is over."""

    def __init__(self, console: Console, *, log_of: Callable[[str], Path]) -> None:
        self._console, self._log_of = console, log_of
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown_s = 0.0
        self._shown: tuple[Any, ...] = ()
        self._output: Output | None = None

    def start(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __call__(self, view: View) -> None:
        for event in view.news:
            if event.kind == "group":
                self._follow(str(event.data["machines"][0]))
            if (text := sentence(event)) is not None:
                self._print_line(text, _LOUD.get(event.kind, ""))
            if event.kind == "worker-failed" and not event.data.get("final"):  # the last one is shown at the end
                self._show_error(str(event.data.get("line") or ""), str(event.data.get("error") or ""))
        now = time.monotonic()
        if self._live is not None and now - self._shown_s >= REDRAW_S:
            update = self._output.update if self._output is not None else ""
            self._live.update(_drawn(view, update), refresh=True)
            self._shown_s = now
        elif self._live is None and now - self._shown_s >= PLAIN_S:
            self._show_plainly(view)
            self._shown_s = now

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
        if self._live is not None:
            self._live.stop()

    def _show_plainly(self, view: View) -> None:
        update = self._output.update if self._output is not None else ""
        shown = (view.step, view.saved_step, update)
        if shown == self._shown:
            return
        if view.step is not None and shown[:2] != self._shown[:2]:
            self._print_line(_line(view))
        if update and update not in self._shown[2:]:
            self._console.print(Text(f"  {update}", style="dim"), soft_wrap=True)
        self._shown = shown

    def _follow(self, machine: str) -> None:
        """Show what the trainer of rank 0 prints."""
        if self._output is not None:
            self._output.close()
        self._output = Output(self._console, self._log_of(machine)).start()

    def _show_error(self, line: str, error: str) -> None:
        """Show a traceback or the last lines, unless the script's own output has just shown them."""
        lines = error.splitlines()
        named = line if line in error or not lines else lines[-1]
        if named and self._output is not None and self._output.has_shown(named):
            return
        for each in lines:
            self._console.print(Text(f"  {plain(each)}", style="red"), soft_wrap=True)

    def _print_line(self, text: str, style: str = "") -> None:
        self._console.print(Text(f"{time.strftime('%H:%M:%S')}  {plain(text)}", style=style), soft_wrap=True)


class Output:
    """Shows what a script prints, at most MOST_LINES in LINES_S. ``update`` is its progress bar, if any."""

    def __init__(self, console: Console, log: Path) -> None:
        self._console, self._log = console, log
        self._lock = threading.Lock()
        self._since_s, self._count, self._skipped = 0.0, 0, 0
        self._recent: deque[str] = deque(maxlen=MOST_LINES)
        self.update = ""
        self._tail = Tail(log, self._lines, on_update=self._rewritten, from_end=True)

    def start(self) -> Output:
        self._tail.start()
        return self

    def has_shown(self, line: str) -> bool:
        self._tail.drain()
        with self._lock:
            return any(line in shown for shown in self._recent)

    def close(self) -> None:
        self._tail.close()
        self._print_skipped()

    def _lines(self, lines: Sequence[str]) -> None:
        self.update = ""
        for line in map(script_output, lines):
            if not line.strip() or line.startswith("[rank"):  # torch repeats a rank's traceback with that prefix
                continue
            now_s = time.monotonic()
            if now_s - self._since_s >= LINES_S:
                self._print_skipped()
                self._since_s, self._count = now_s, 0
            self._count += 1
            if self._count > MOST_LINES:
                self._skipped += 1
                continue
            with self._lock:
                self._recent.append(line)
            self._console.print(Text(f"  {plain(line)}", style="dim"), soft_wrap=True)

    def _rewritten(self, line: str) -> None:
        self.update = plain(line)

    def _print_skipped(self) -> None:
        if self._skipped:
            self._console.print(
                Text(f"  ... {self._skipped:,} lines are not shown; all are in {self._log}", style="dim"),
                soft_wrap=True,
            )
        self._skipped = 0


def plain(text: str) -> str:
    """Return text without terminal control sequences; other control characters are shown as escapes."""
    return printable(_ESCAPES.sub("", text[:MOST_WIDE]).expandtabs())


def sentence(event: Event) -> str | None:
    """Return an event as a sentence for the user; None if it is not shown."""
    render = _SENTENCES.get(event.kind)
    return None if render is None else render(event.machine or "", event.data)


def _down(machine: str, data: Mapping[str, Any]) -> str | None:
    words = {"preempted": "is preempted", "lost": "is lost", "failed": "failed", "left": "left at its notice"}
    return f"{machine} {words[data['why']]}" if data.get("why") in words else None


def _group(_: str, data: Mapping[str, Any]) -> str:
    names = f"{', '.join(data['machines'])} {'start' if len(data['machines']) > 1 else 'starts'}"
    again = "" if data.get("took_s") is None else f", {format_seconds(data['took_s'])} after the last group broke"
    return f"group {data['round']}: {names}{again}"


def _notice(machine: str, data: Mapping[str, Any]) -> str:
    left = data.get("seconds_left")
    return f"{machine} will be preempted{'' if left is None else f' in {format_seconds(left)}'} ({data['action']})"


def _save(_: str, data: Mapping[str, Any]) -> str | None:
    """Report a failed save, once for each reason."""
    if data.get("state") != "failed" or not data.get("first"):
        return None
    return f"step {data.get('step')} was NOT saved: {data.get('why')}"


def _failed(machine: str, data: Mapping[str, Any]) -> str:
    line = f" ({data['line']})" if data.get("line") else ""
    return f"the script failed on {machine}{line}: it is {'not ' if data.get('final') else ''}restarted"


_SENTENCES: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "machine-up": lambda machine, data: f"{machine} is up ({data['market']} {data['instance']})",
    "machine-down": _down,
    "group": _group,
    "notice": _notice,
    "save": _save,
    "decision": lambda machine, data: f"at the notice of {machine}: {data['choice']} ({data['why']})",
    "replanned": lambda _, data: "; ".join(data["changes"]),
    "worker-failed": _failed,
    "warning": lambda _, data: str(data["text"]),
    "restored": lambda machine, data: f"{machine} resumes at step {data['step']}" if not data.get("rank") else None,
}


def _line(view: View) -> str:
    return "  ".join(part for part in (_step(view), _checkpoint(view), f"${view.cost_usd:.4f}") if part)


def _step(view: View) -> str:
    step = "no step yet" if view.step is None else f"step {view.step}"
    if not view.world_size:
        return "not training" if view.step is None else f"{step}, not training"
    rate = "" if view.step is None or view.steps_per_s is None else f" at {view.steps_per_s:.1f}/s"
    return f"{step}{rate} on {view.world_size} rank{'s' * (view.world_size > 1)}"


def _checkpoint(view: View) -> str:
    if view.saved_step is None:
        return "no checkpoint yet"
    age = "" if view.saved_at_s is None else f", {_since(view.saved_at_s, time.time())} old"
    where = f" in {view.saved_place}" if view.saved_place else ""
    return f"checkpoint {view.saved_step}{where}{age}"


def _drawn(view: View, update: str) -> Group:
    rows = Table(box=None, pad_edge=False, header_style="bold cyan")
    for title in ("machine", "what", "state", "for"):
        rows.add_column(title)
    rows.add_column("$/h", justify="right")
    rows.add_column("cost", justify="right")
    now_s = time.time()
    for machine in view.machines:
        rows.add_row(*_row(machine, now_s))
    losses = f" · {view.losses} lost and replaced" if view.losses else ""
    shown = Text(f"{_step(view)} · ${view.cost_usd:.4f} so far{losses}\n{_checkpoint(view)}", style="bold")
    bar = [Text(update, style="dim", overflow="crop", no_wrap=True)] if update else []
    return Group(Text(), *bar, rows, shown)


def _since(at_s: float, now_s: float) -> str:
    """Return a duration in whole seconds, which can be read while it changes."""
    return format_seconds(float(max(0, int(now_s - at_s)))) if now_s - at_s >= 1 else "0 s"


def _row(view: MachineView, now_s: float) -> tuple[str | Text, ...]:
    machine = view.machine
    return (
        Text(machine.name),
        Text(f"{machine.market} {machine.instance}"),
        Text(view.state, style=_COLOURS[view.state]),
        _since(view.since_s, now_s) if view.since_s else "",
        f"{machine.usd_per_hour:.4f}",
        f"${view.cost_usd(now_s):.4f}",
    )
