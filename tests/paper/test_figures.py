"""Figures of sweeps, as ``deepvm sweep --figure`` draws them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepvm.errors import MissingExtra, UsageError
from deepvm.paper.figures import draw_sweep, draw_table, draw_transmission
from deepvm.paper.sweeps import Sweeps
from deepvm.paper.transmission import make_transmission
from deepvm.plan import Point
from tests.support.drawings import recorded

STARTS = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}
POINTS = [
    Point(policy=policy, budget_usd=float(usd), count=usd, performance=usd * rate)
    for policy, rate in (("deepvm", 2.0), ("cost-first", 1.0))
    for usd in (1, 2, 3)
]


@pytest.mark.parametrize("suffix", STARTS)
def test_the_suffix_chooses_the_format(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"sweep{suffix}"
    draw_sweep(POINTS, path, title="three budgets")
    assert path.read_bytes().startswith(STARTS[suffix])


@pytest.mark.parametrize(("count", "marker"), [(24, "marker o 4"), (25, "")])
def test_few_budgets_get_a_dot_each(count: int, marker: str, tmp_path: Path) -> None:
    points = [Point(policy="noscale", budget_usd=float(usd), count=usd, performance=2.0 * usd) for usd in range(count)]
    with recorded() as drawings:
        draw_sweep(points, tmp_path / "f.svg", title="t")
    assert (marker in drawings["t"]) is True
    assert ("marker" in drawings["t"]) is bool(marker)
    assert "performance (relative to the highest)" in drawings["t"]


def test_a_sweep_without_any_cluster_says_so(tmp_path: Path) -> None:
    with recorded() as drawings:
        draw_sweep([Point(policy="deepvm", budget_usd=1.0)], tmp_path / "f.svg", title="t")
    assert "axes  (hidden)" in drawings["t"]
    assert "text 'nothing is feasible at these budgets' #222222 10 normal center" in drawings["t"]


def test_a_drawing_names_its_policies_and_its_title(sweeps: Sweeps, tmp_path: Path) -> None:
    path = tmp_path / "sweep.SVG"
    draw_sweep(sweeps.flopp, path, title="paper-virtual, by flopp")
    text = path.read_text(encoding="utf-8")
    for words in ("DeepVM", "NoScale", "Cost-First", "Performance-First", "paper-virtual, by flopp"):
        assert words in text


@pytest.mark.parametrize("points", [[], [Point(policy="deepvm", budget_usd=0.0)], POINTS[3:], POINTS[:1]])
def test_few_points_or_none_still_make_a_figure(points: list[Point], tmp_path: Path) -> None:
    draw_sweep(points, tmp_path / "sweep.png", title="little")
    assert (tmp_path / "sweep.png").stat().st_size > 5_000


@pytest.mark.parametrize("name", ["sweep.jpg", "sweep", "sweep.svg.txt"])
def test_an_unknown_suffix_is_reported_with_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.svg, \.png, \.pdf"):
        draw_sweep(POINTS, tmp_path / name, title="")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written") as told:
        draw_sweep(POINTS, tmp_path / "nowhere" / "sweep.svg", title="")
    assert "\n" not in str(told.value)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'deepvm\[figures\]'"):
        draw_sweep(POINTS, tmp_path / "sweep.svg", title="")


def test_a_readers_own_settings_change_nothing(tmp_path: Path) -> None:
    import matplotlib

    draw_sweep(POINTS, tmp_path / "plain.svg", title="same")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False}):
        draw_sweep(POINTS, tmp_path / "own.svg", title="same")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "plain.svg").read_bytes() == (tmp_path / "own.svg").read_bytes()


def test_figures_are_imported_without_matplotlib_and_drawn_without_pyplot(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from deepvm.paper.figures import draw_sweep, draw_table
from deepvm.plan import Point
assert "matplotlib" not in sys.modules
draw_sweep([Point(policy="deepvm", budget_usd=1.0, performance=1.0)], Path({str(tmp_path / "x.svg")!r}), title="")
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_table_is_drawn_with_its_title_and_cells(tmp_path: Path) -> None:
    path = tmp_path / "table.svg"
    draw_table("Table IV", ("name", "price"), [("first", "1.5"), ("second", "2.5")], [path])
    text = path.read_text()
    assert all(f"<!-- {cell} -->" in text for cell in ("Table IV", "name", "second", "2.5"))


def test_the_axes_of_a_figure_say_what_they_are_of(tmp_path: Path) -> None:
    path = tmp_path / "transmission.svg"
    draw_transmission(make_transmission(), [path])
    text = path.read_text(encoding="utf-8")
    for words in ("memory nodes", "seconds"):
        assert f"<!-- {words} -->" in text
