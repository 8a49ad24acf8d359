"""Figures as text: what matplotlib was asked to draw, artist by artist. Its rendering is not part of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.spines import Spine
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator, FuncFormatter

_WHOLE = 12  # values of an array that are all shown


@contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """Yield descriptions, by their titles, of the figures that are saved meanwhile. They are saved all the same."""
    found: dict[str, str] = {}
    save = Figure.savefig

    def savefig(figure: Figure, *args: Any, **options: Any) -> None:
        found.setdefault(figure.get_suptitle(), describe(figure))  # before its parts are arranged
        save(figure, *args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", savefig)
        yield found


def describe(figure: Figure) -> str:
    """Return a line for everything on a figure."""
    width, height = figure.get_size_inches()
    lines = [f"{width:.4g} x {height:.4g} inches"]
    lines += [_artist(child) for child in figure.texts if child.get_text()]
    for axes in figure.axes:
        lines += ["", *_axes(axes)]
    return "\n".join(lines) + "\n"


def _axes(axes: Axes) -> Iterator[str]:
    titles = [axes.get_title(loc=place) for place in ("left", "center", "right")]
    yield f"axes {'; '.join(filter(None, titles))}" + ("" if axes.axison else " (hidden)")
    for name, axis, limits in (("x", axes.xaxis, axes.get_xlim()), ("y", axes.yaxis, axes.get_ylim())):
        yield f"  {name}: {axis.get_label_text()!r} {axis.get_scale()} {_numbers(limits)}{_ticks(axis)}"
    hidden = [side for side, spine in axes.spines.items() if not spine.get_visible()]
    yield f"  without {hidden}"
    for child in axes.get_children():
        of_title = isinstance(child, Text) and not isinstance(child, Annotation) and child not in axes.texts
        if not isinstance(child, Spine | Axis) and not of_title and child is not axes.patch:
            yield f"  {_artist(child)}"


def _ticks(axis: Axis) -> str:
    shown = ""
    locator, form = axis.get_major_locator(), axis.get_major_formatter()
    if isinstance(locator, FixedLocator):
        shown += f" ticks {_numbers(locator.locs)}"
        shown += f" {form.format_ticks(locator.locs)}"
    elif isinstance(form, FuncFormatter):
        shown += f" as {form(0.25)}"
    grid = any(line.get_visible() for line in axis.get_gridlines())
    minor = "" if len(axis.get_minorticklocs()) == 0 else " minor ticks"
    return f"{shown}{' grid' if grid else ''}{minor}"


def _artist(artist: Artist) -> str:
    label = str(artist.get_label())
    named = "" if label.startswith("_") or not label else f" {label!r}"
    if isinstance(artist, Line2D):
        x, y = artist.get_data()
        mark = (
            ""
            if artist.get_marker() in ("None", None)
            else f" marker {artist.get_marker()} {artist.get_markersize():g}"
        )
        style = f"{artist.get_color()} {artist.get_linestyle()} {artist._dash_pattern} {artist.get_drawstyle()}"  # type: ignore[attr-defined]
        return (
            f"line{named} {style} width {artist.get_linewidth():g}{mark} z {artist.get_zorder():g}: "
            f"{_numbers(x)} -> {_numbers(y)}"
        )
    if isinstance(artist, Rectangle):
        edges = (*artist.get_xy(), artist.get_width(), artist.get_height())
        return f"box{named} {to_hex(artist.get_facecolor(), keep_alpha=True)}: {_numbers(edges)}"
    if isinstance(artist, Collection):
        colours = [to_hex(one, keep_alpha=True) for one in (*artist.get_facecolor(), *artist.get_edgecolor())]
        parts = np.concatenate([path.vertices for path in artist.get_paths()] or [np.zeros((0, 2))])
        where = artist.get_offsets()
        return (
            f"{type(artist).__name__}{named} {colours} width {_numbers(artist.get_linewidth())} "
            f"sizes {_numbers(getattr(artist, 'get_sizes', list)())} z {artist.get_zorder():g}: "
            f"{_numbers(np.asarray(where)[:, 0])} -> {_numbers(np.asarray(where)[:, 1])}; "
            f"{_numbers(parts[:, 0])} -> {_numbers(parts[:, 1])}"
        )
    if isinstance(artist, Text):
        style = f"{artist.get_color()} {artist.get_fontsize():g} {artist.get_fontweight()}"
        style += f" {artist.get_ha()} {artist.get_va()}"
        words = (
            f"text {artist.get_text()!r} {style} turned {artist.get_rotation():g} at {_numbers(artist.get_position())}"
        )
        if isinstance(artist, Annotation):
            words += f" of {_numbers(artist.xy)} by {artist.xycoords}, {artist.anncoords}, {artist.arrowprops}"
        return words
    if isinstance(artist, Legend):
        box = artist.get_bbox_to_anchor().transformed(artist.axes.transAxes.inverted())  # type: ignore[union-attr]
        size = [text.get_fontsize() for text in artist.get_texts()][:1]
        texts = [text.get_text() for text in artist.get_texts()]
        pads = (artist.borderpad, artist.handlelength, artist.handletextpad)
        return f"legend {texts} {_numbers(size)} at {artist._loc} {_numbers(box.bounds)} pads {_numbers(pads)}"  # type: ignore[attr-defined]
    return type(artist).__name__


def _numbers(values: Any) -> str:
    """Format an array: all of a short one; of a long one its length, every tenth part, and the mean."""
    array = np.asarray(values, dtype=float).ravel()
    if len(array) <= _WHOLE:
        return "[" + " ".join(f"{one:.4g}" for one in array + 0.0) + "]"
    some = " ".join(f"{one:.4g}" for one in array[:: len(array) // 10] + 0.0)
    return f"[{len(array)}: {some} .. {array[-1] + 0.0:.4g}, mean {np.nanmean(array):.4g}]"
