"""The timeline of a process's start, until its first step is finished: printed, drawn, or as JSON.

The checkpointer records when torch was imported, when it was created, restored, and when the optimizer first stepped;
``deepvm-fetch`` records its own times. A program may add other stages before its first step:

    with deepvm.checkpoint.timeline.stage("rendezvous"):
        torch.distributed.init_process_group()
"""

from __future__ import annotations

import html
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import deepvm
from deepvm.fetch import clock

COLUMNS = 60
AT_ONCE_S = 0.25  # it takes longer to build a real model
_LOADED_S = clock.now_s()  # torch is imported by now


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    name: str
    began_s: float  # since this process was started; less than 0 for what another one did before
    ended_s: float
    beside: bool = False  # by another process
    unfinished: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "began_s": round(self.began_s, 4), "ended_s": round(self.ended_s, 4)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The stages of a start, in the order in which they began."""

    stages: tuple[Stage, ...]

    @property
    def total_s(self) -> float:
        """From the start of the process to the end of its last stage so far."""
        return max((stage.ended_s for stage in self.stages if not stage.beside), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {"total_s": round(self.total_s, 4), "stages": [stage.to_json() for stage in self.stages]}

    def __str__(self) -> str:
        first, last = self._limits()
        width = max((len(stage.name) for stage in self.stages), default=0)
        lines = [f"{self.total_s:.2f} s from the start of the process"]
        for stage in self.stages:
            start = round((stage.began_s - first) / (last - first) * COLUMNS)
            end = max(start + 1, round((stage.ended_s - first) / (last - first) * COLUMNS))
            bar = (" " * start + ("░" if stage.beside else "█") * (end - start))[:COLUMNS]
            lines.append(f"{stage.name:{width}} {bar:{COLUMNS}} {_seconds(stage)}")
        return "\n".join(lines)

    def svg(self) -> str:
        """Draw it for a page, 720 pixels wide."""
        first, last = self._limits()
        left, right, row = 110, 110, 24
        scale = (720 - left - right) / (last - first)
        height = row * len(self.stages) + 44
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" viewBox="0 0 720 {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<text x="{left}" y="16">{self.total_s:.2f} s from the start of the process</text>',
        ]
        for number, stage in enumerate(self.stages):
            y = 26 + row * number
            x, wide = left + (stage.began_s - first) * scale, max(1.0, (stage.ended_s - stage.began_s) * scale)
            colour = "#9aa5b1" if stage.beside else "#2f6db5"
            parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(stage.name)}</text>')
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{row - 6}" fill="{colour}"/>')
            parts.append(f'<text x="{x + wide + 6:.1f}" y="{y + 13}">{html.escape(_seconds(stage))}</text>')
        zero = left - first * scale
        parts.append(f'<line x1="{zero:.1f}" y1="22" x2="{zero:.1f}" y2="{height - 18}" stroke="#444"/>')
        parts.append(f'<text x="{zero:.1f}" y="{height - 4}" text-anchor="middle">0 s</text>')
        parts.append("</svg>\n")
        return "\n".join(parts)

    def _limits(self) -> tuple[float, float]:
        first = min((stage.began_s for stage in self.stages), default=0.0)
        last = max((stage.ended_s for stage in self.stages), default=0.0)
        return min(0.0, first), max(last, min(0.0, first) + 1e-3)


def _seconds(stage: Stage) -> str:
    return f"{stage.ended_s - stage.began_s:.2f} s{' so far' if stage.unfinished else ''}"


# --- recording ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    name: str
    began_s: float  # since boot
    ended_s: float | None
    beside: bool = False


class Recorder:
    """Spans of time, as they are recorded."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []
        self._lock = threading.Lock()

    def add(self, name: str, began_s: float, ended_s: float | None, *, beside: bool = False) -> None:
        with self._lock:
            self._spans.append(_Span(name=name, began_s=began_s, ended_s=ended_s, beside=beside))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began_s = clock.now_s()
        try:
            yield
        finally:
            self.add(name, began_s, clock.now_s())

    def spans(self) -> list[_Span]:
        with self._lock:
            return list(self._spans)

    def last_ended_s(self, otherwise: float) -> float:
        return max((span.ended_s for span in self.spans() if span.ended_s and not span.beside), default=otherwise)


_process = Recorder()
stage = _process.stage


def mark(name: str) -> None:
    """Record a stage that ends now, and began when the one before it ended."""
    _process.add(name, _process.last_ended_s(imported_s()), clock.now_s())


def imported_s() -> float:
    """Return when torch had been imported, as far as is known; in a forked process, when it was forked."""
    seen_s = _LOADED_S if deepvm.torch_seen_s is None else deepvm.torch_seen_s
    return max(seen_s, clock.process_started_s())


class Start:
    """The start of a process, as one checkpointer records it."""

    def __init__(self, optimizers: Sequence[Any], *, in_group: bool) -> None:
        self._made_s, self._in_group = clock.now_s(), in_group
        self._own = Recorder()
        self._stepped = False
        self._hooks = [optimizer.register_step_post_hook(self.stepped) for optimizer in optimizers]

    def restoring(self) -> AbstractContextManager[None]:
        return self._own.stage("restore")

    def fetched(self, began_s: float, ended_s: float | None) -> None:
        """Record the times of the prefetch process."""
        self._own.add("fetch", began_s, ended_s, beside=True)

    def stepped(self, *_: object) -> None:
        """Record that the first step is finished: an optimizer's post-hook."""
        if not self._stepped:
            self._stepped = True
            began_s = max(self._own.last_ended_s(self._made_s), _process.last_ended_s(self._made_s))
            self._own.add("first step", began_s, clock.now_s())

    def remove_hooks(self) -> None:
        """Remove the hooks after the first step; they cannot do so while they are being called."""
        if self._stepped and self._hooks:
            self.close()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def timeline(self) -> Timeline:
        started_s, now_s = clock.process_started_s(), clock.now_s()
        spans = [*self._derived(started_s), *_process.spans(), *self._own.spans()]
        stages = [
            Stage(
                name=span.name,
                began_s=(span.began_s if span.beside else max(span.began_s, started_s)) - started_s,
                ended_s=(now_s if span.ended_s is None else span.ended_s) - started_s,
                beside=span.beside,
                unfinished=span.ended_s is None,
            )
            for span in spans
            if span.beside or span.ended_s is None or span.ended_s > started_s  # or else it was before a fork
        ]
        return Timeline(stages=tuple(sorted(stages, key=lambda stage: (stage.began_s, stage.ended_s))))

    def _derived(self, started_s: float) -> list[_Span]:
        """Derive stages before the checkpointer was created, as far as the program did not record any."""
        recorded = [span for span in _process.spans() if span.ended_s is not None and started_s < span.ended_s]
        imported, names = imported_s(), {span.name for span in recorded}
        model = "rendezvous, model" if self._in_group and "rendezvous" not in names else "model"
        if deepvm.torch_seen_s is None and not recorded and self._made_s - imported < AT_ONCE_S < imported - started_s:
            return [_Span(name=f"import, {model}", began_s=started_s, ended_s=self._made_s)]
        found = [] if "import" in names else [_Span(name="import", began_s=started_s, ended_s=imported)]
        if "model" not in names:
            ended_s = [s.ended_s for s in recorded if s.ended_s is not None and s.ended_s <= self._made_s]
            began_s = max([imported, *ended_s])
            found.append(_Span(name=model, began_s=began_s, ended_s=self._made_s))
        return found
