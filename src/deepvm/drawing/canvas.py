"""Draw figures: paths and a size in, files with one style and the same bytes on every run out."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deepvm.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, GRID = "#222222", "#6b6b6b", "#e4e4e4"
# Okabe and Ito's colours, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # part of matplotlib, so that figures look the same everywhere
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9a9a9a",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.14,
    "figure.constrained_layout.h_pad": 0.12,
    "svg.hashsalt": "deepvm",  # without it, ids are random
}
# Dates and versions would make equal figures differ.
_METADATA: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra("drawing a figure", "figures") from None


def check_paths(paths: Sequence[Path]) -> None:
    """Raise if these figures cannot be drawn: an unknown format, or no matplotlib."""
    for path in paths:
        if path.suffix.lower() not in _METADATA:
            raise UsageError(f"{path} has no known figure format: use {', '.join(_METADATA)}")
    require_matplotlib()


@contextmanager
def figure(paths: Sequence[Path], *, width_in: float, height_in: float) -> Iterator[Figure]:
    """Yield a figure to draw on, then write it to all paths in the formats of their suffixes."""
    check_paths(paths)
    import matplotlib
    from matplotlib.figure import Figure as NewFigure  # not pyplot, which may open windows

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's own settings
        matplotlib.rcParams.update(cast(Any, _STYLE))  # its stubs spell out every key
        drawn = NewFigure(figsize=(width_in, height_in), layout="constrained")
        yield drawn
        for path in paths:
            _save(drawn, path)


def _save(drawn: Figure, path: Path) -> None:
    suffix, content = path.suffix.lower(), io.BytesIO()
    drawn.savefig(content, format=suffix[1:], dpi=160, metadata=_METADATA[suffix])
    try:
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror or error}): choose another place") from None


def headline(drawn: Figure, title: str, subtitle: str) -> None:
    """Write a title, and below it how the figure was made."""
    drawn.suptitle(title, x=0.14 / drawn.get_figwidth(), ha="left", fontsize=13, fontweight="bold")
    if subtitle:
        drawn.text(
            0.15 / drawn.get_figwidth(),
            1 - 0.42 / drawn.get_figheight(),
            subtitle,
            ha="left",
            va="top",
            fontsize=9.5,
            color=QUIET,
        )
        engine: Any = drawn.get_layout_engine()
        engine.set(rect=(0, 0, 1, 1 - 0.20 / drawn.get_figheight()))


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]], *, gap: float = 0.055) -> None:
    """Write names beside the right ends of lines, (x, y, name, colour), without overlap."""
    low, high = axes.get_ylim()
    height = (high - low) or 1.0
    right = axes.get_xlim()[1]
    below = -1.0
    for _x, y, name, colour in sorted(ends, key=lambda end: end[1]):
        place = max((y - low) / height, below + gap)
        axes.annotate(
            name, xy=(right, y), xytext=(1.015, place), textcoords="axes fraction", va="center",
            color=colour, fontweight="bold", annotation_clip=False,
        )  # fmt: skip
        below = place
