"""What people see while a run goes on: a table that is redrawn in a terminal, plain lines anywhere else."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deepvm.runtime.events import Event
from deepvm.runtime.tail import Tail
from deepvm.runtime.view import Place, View
from deepvm.units import format_seconds

REDRAW_S = 0.1
PLAIN_S = 5.0  # between two lines of progress
# torch's own: what a lost peer makes it say, and logs
_NOT_THE_SCRIPTS = ("[rank", "[W", "W1", "I1", "E1", "W0", "I0", "E0")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # other control characters are shown as escapes
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
        if self._live is not None:
            self._live.start()
        self._shown_s = 0.0
        self._told: tuple[Any, ...] = ()
        self._tail: Tail | None = None

    def __call__(self, view: View) -> None:
        for event in view.news:
            if event.kind == "group":
                self._follow(str(event.data["machines"][0]))
            if (text := sentence(event)) is not None:
                self._say(text)
        now = time.monotonic()
        if self._live is not None and now - self._shown_s >= REDRAW_S:
            self._live.update(_drawn(view), refresh=True)
            self._shown_s = now
        elif self._live is None and now - self._shown_s >= PLAIN_S and view.step is not None:
            told = (view.step, view.saved_step)
            if told != self._told:
                self._say(_line(view))
            self._shown_s, self._told = now, told

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
        if self._live is not None:
            self._live.stop()

    def _follow(self, machine: str) -> None:
        """Show what the trainer of rank 0 prints."""
        if self._tail is not None:
            self._tail.close()
        path = self._log_of(machine)
        self._tail = Tail(path, self._printed, from_end=True)

    def _printed(self, line: str) -> None:
        if line and not line.startswith(_NOT_THE_SCRIPTS) and " deepvm." not in line:
            self._console.print(Text(f"  {_COLOUR.sub('', line)}", style="dim"), soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(Text(f"{time.strftime('%H:%M:%S')}  {text}"), soft_wrap=True)


def sentence(event: Event) -> str | None:
    """What happened, for people; None where nobody needs to read it."""
    tell = _SENTENCES.get(event.kind)
    return None if tell is None else tell(event.machine or "", event.data)


def _down(machine: str, data: Mapping[str, Any]) -> str | None:
    words = {"preempted": "is taken away", "lost": "is lost", "failed": "failed", "left": "left at its notice"}
    return f"{machine} {words[data['why']]}" if data.get("why") in words else None


def _group(_: str, data: Mapping[str, Any]) -> str:
    names = f"{', '.join(data['machines'])} {'train' if len(data['machines']) > 1 else 'trains'}"
    again = "" if data.get("took_s") is None else f", {format_seconds(data['took_s'])} after the last group broke"
    return f"group {data['round']}: {names}{again}"


def _notice(machine: str, data: Mapping[str, Any]) -> str:
    left = data.get("seconds_left")
    return f"{machine} will be taken away{'' if left is None else f' in {format_seconds(left)}'} ({data['action']})"


_SENTENCES: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "machine-up": lambda machine, data: f"{machine} is up ({data['market']} {data['instance']})",
    "machine-down": _down,
    "group": _group,
    "notice": _notice,
    "decision": lambda machine, data: f"at the notice of {machine}: {data['choice']} ({data['why']})",
    "replanned": lambda _, data: "; ".join(data["changes"]),
    "warning": lambda _, data: str(data["text"]),
    "restored": lambda machine, data: f"{machine} goes on at step {data['step']}" if not data.get("rank") else None,
}


def _line(view: View) -> str:
    return "  ".join(part for part in (_step(view), _checkpoint(view), f"${view.cost_usd:.4f}") if part)


def _step(view: View) -> str:
    if not view.world_size:
        return f"step {view.step or 0}, nobody trains now"
    rate = "" if view.steps_per_s is None else f" at {view.steps_per_s:.1f}/s"
    return f"step {view.step or 0}{rate} on {view.world_size} rank{'s' * (view.world_size > 1)}"


def _checkpoint(view: View) -> str:
    if view.saved_step is None:
        return "no checkpoint yet"
    age = "" if view.saved_at_s is None else f", {_since(view.saved_at_s, time.time())} old"
    return f"checkpoint {view.saved_step} in {view.saved_place or 'memory'}{age}"


def _drawn(view: View) -> Group:
    rows = Table(box=None, pad_edge=False, header_style="bold cyan")
    for title in ("machine", "what", "state", "for"):
        rows.add_column(title)
    rows.add_column("$/h", justify="right")
    rows.add_column("cost", justify="right")
    now_s = time.time()
    for place in view.places:
        rows.add_row(*_row(place, now_s))
    losses = f" · {view.losses} lost and replaced" if view.losses else ""
    told = Text(f"{_step(view)} · ${view.cost_usd:.4f} so far{losses}\n{_checkpoint(view)}", style="bold")
    return Group(Text(), rows, told)


def _since(at_s: float, now_s: float) -> str:
    """In whole seconds, so that it can be read while it changes."""
    return format_seconds(float(max(0, int(now_s - at_s)))) if now_s - at_s >= 1 else "0 s"


def _row(place: Place, now_s: float) -> tuple[str | Text, ...]:
    machine = place.machine
    return (
        Text(machine.name),
        Text(f"{machine.market} {machine.instance}"),
        Text(place.state, style=_COLOURS[place.state]),
        _since(place.since_s, now_s) if place.since_s else "",
        f"{machine.usd_per_hour:.4f}",
        f"${place.cost_usd(now_s):.4f}",
    )
