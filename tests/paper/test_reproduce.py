"""What ``deepvm reproduce`` writes."""

from __future__ import annotations

import csv
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from deepvm.catalog import load
from deepvm.cli.app import run
from deepvm.errors import MissingExtra, UsageError
from deepvm.paper import Reproduction, reference, reproduce
from deepvm.paper.clusters import make_rows
from deepvm.paper.reproduce import _Folder
from deepvm.paper.sweeps import Sweeps
from tests.support.golden import rounded, same_as_file

HERE = Path(__file__).parent
FIGURES = {  # name: width and height, in points
    "table-iv": (988.56, 228.96),
    "figure-3-published": (604.8, 331.2),
    "figure-3-text": (604.8, 331.2),
    "figure-3-throughput": (604.8, 331.2),
    "optimum": (604.8, 302.4),
    "figure-4": (748.8, 345.6),
    "scaling": (806.4, 338.4),
    "transmission": (561.6, 316.8),
}


def read(made: Reproduction, name: str) -> list[dict[str, str]]:
    with (made.out / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_a_drawing_a_picture_and_a_table(name: str, made: Reproduction) -> None:
    root = ElementTree.parse(made.out / f"{name}.svg").getroot()  # noqa: S314 - our own file
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert (root.get("width"), root.get("height")) == tuple(f"{points:g}pt" for points in FIGURES[name])
    assert len(root.findall(".//{http://www.w3.org/2000/svg}path")) > 10
    picture = (made.out / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    assert read(made, name)


def test_every_figure_shows_what_it_showed(made: Reproduction, drawings: dict[str, str]) -> None:
    assert len(drawings) == len(FIGURES)
    text = "".join(f"=== {title}\n{drawn}\n" for title, drawn in drawings.items())
    same_as_file(text, HERE / "drawings" / "reproduction.txt")


def test_tables_and_comparison_are_as_they_were(made: Reproduction) -> None:
    parts = []
    for file in sorted(made.out.iterdir()):
        lines = file.read_text(encoding="utf-8").splitlines() if file.suffix in (".csv", ".md") else []
        if file.name == "comparison.csv":
            continue  # it has the rows of comparison.md
        some = lines if len(lines) < 60 else [lines[0], *lines[5::10]]
        parts += [f"=== {file.name}, {len(lines)} lines", *some, ""] if lines else [f"=== {file.name}"]
    same_as_file(rounded("\n".join(parts)), HERE / "drawings" / "tables.txt")


@pytest.mark.parametrize("columns", [100, 160])
def test_the_command_shows_the_comparison(
    columns: int, made: Reproduction, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Path] = []
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("deepvm.paper.reproduce", lambda out, progress: told.append(out) or made)
    assert run(["reproduce"]) == 0
    assert told == [Path("reproduction")]
    shown = capsys.readouterr().out.replace(str(made.out), "FOLDER")
    same_as_file(shown, HERE / "drawings" / f"screen-{columns}.txt")


def test_progress_names_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _Folder(tmp_path, lambda *row: told.append(row))
    told: list[tuple[str, int, int]] = []
    folder.report("planning")
    assert [path.name for path in folder.pictures("optimum")] == ["optimum.svg", "optimum.png"]
    folder.text("a.txt", "a")
    folder.report("comparison")
    assert told == [("planning", 0, 10), ("optimum", 1, 10), ("comparison", 2, 10)]
    assert [path.name for path in folder.files] == ["optimum.svg", "optimum.png", "a.txt"]
    with pytest.raises(UsageError, match=r"missing/b\.txt cannot be written"):
        folder.text("missing/b.txt", "")


def test_all_files_are_listed_and_nothing_else_is_written(made: Reproduction) -> None:
    assert sorted(made.files) == sorted(made.out.iterdir())


def test_a_table_may_have_a_single_row(tmp_path: Path) -> None:
    _Folder(tmp_path, None).table("one", [{"name": "a", "usd": 1.5}])
    assert (tmp_path / "one.csv").read_text() == "name,usd\na,1.5\n"


def test_table_iv_is_the_published_one(made: Reproduction) -> None:
    rows = read(made, "table-iv")
    assert [row["configuration"] for row in rows] == [was.name for was in reference.TABLE_IV]
    for row, was in zip(rows, reference.TABLE_IV, strict=True):
        assert row["cluster_ours"] == row["cluster_published"]
        assert float(row["hourly_usd_ours"]) == pytest.approx(was.hourly_usd, abs=5e-5)
        assert float(row["total_usd_predicted"]) == pytest.approx(was.total_usd, rel=0.12)


def test_every_row_of_table_iv_is_planned_with_the_published_machines() -> None:
    for row in make_rows(load("paper-aws-2023")):
        was = row.published
        assert (row.gpu, row.gpu_count, row.cpu, row.cpu_count) == (was.gpu, was.gpu_count, was.cpu, was.cpu_count)


def test_everything_of_the_published_method_comes_out_the_same(made: Reproduction) -> None:
    reproduced = [c for c in made.comparisons if c.kind == "reproduced"]
    assert len(reproduced) == 20
    assert [c for c in reproduced if not c.agrees] == []


def test_the_published_costs_follow_from_makespan_and_price() -> None:
    for was in reference.TABLE_IV:
        assert was.makespan_s / 3600 * was.hourly_usd == pytest.approx(was.total_usd, abs=5.5e-5)


def test_figure_3_tables_hold_the_swept_points(made: Reproduction, sweeps: Sweeps) -> None:
    for name, points in (("figure-3-text", sweeps.flopp), ("figure-3-throughput", sweeps.throughput)):
        rows = read(made, name)
        assert len(rows) == len(points) == 101 * 4
        for row, point in zip(rows, points, strict=True):
            assert row["instance"] == (point.instance or "")
            assert row["performance"] == ("" if point.performance is None else str(point.performance))


def test_the_published_evaluation_multiplies_by_n_twice(made: Reproduction) -> None:
    for text, evaluated in zip(read(made, "figure-3-text"), read(made, "figure-3-published"), strict=True):
        if text["performance"]:
            doubled = float(text["performance"]) * int(text["count"])
            assert float(evaluated["performance"]) == pytest.approx(doubled)


def test_performance_is_relative_to_deepvms_highest(made: Reproduction) -> None:
    for name in ("figure-3-text", "figure-3-published", "figure-3-throughput"):
        shares = [
            float(row["normalised"]) for row in read(made, name) if row["policy"] == "deepvm" and row["normalised"]
        ]
        assert max(shares) == 1.0


def test_the_comparison_is_written_as_it_was_returned(made: Reproduction) -> None:
    rows = read(made, "comparison")
    assert len(rows) == len(made.comparisons)
    for row, c in zip(rows, made.comparisons, strict=True):
        assert (row["part"], row["kind"], row["published"], row["ours"]) == (
            c.part,
            c.kind,
            str(c.published),
            str(c.ours),
        )
    markdown = (made.out / "comparison.md").read_text(encoding="utf-8")
    assert markdown.count("\n| ") == len(rows) + 5  # a heading for each part


def test_the_command_prints_one_json_document_and_a_second_run_writes_the_same_bytes(
    made: Reproduction, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reproduce", "--out", str(tmp_path / "again"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {c["quantity"] for c in document["comparisons"]} >= {"cluster", "feasible budgets"}
    assert "comparison.md" in document["files"]
    again = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert again.keys() == {file.name for file in made.files}
    for first in made.files:
        assert first.read_bytes() == again[first.name], first.name


def test_a_file_where_the_folder_should_be_is_reported(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match="--out"):
        reproduce(tmp_path / "taken")


def test_without_matplotlib_the_extra_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"deepvm\[figures\]"):
        reproduce(tmp_path / "out")
    assert not (tmp_path / "out").exists()
