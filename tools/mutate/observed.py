"""Which tests execute which statements: one run of all tests, kept in `.mutate/observed/` per test file."""

from __future__ import annotations

import hashlib
import json
import queue
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tools.mutate import scratch
from tools.mutate.tester import Tester, run_side_by_side

_FILE_LIMIT_S = 900.0


class Observed:
    """Tests by statement: `tests_at(path, line)` gives ids; `seconds` holds their times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._at: dict[tuple[str, int], set[str]] = defaultdict(set)

    def add(self, test: str, seconds: float, lines: Iterable[tuple[str, int]]) -> None:
        """Note one test that passed."""
        self.seconds[test] = seconds
        for place in lines:
            self._at[place].add(test)

    def tests_at(self, path: str, line: int) -> set[str]:
        """Return ids of the tests that execute a statement."""
        return self._at.get((path, line), set())


def digest(names: Iterable[str]) -> str:
    """Return a short hash of files of the tree."""
    total = hashlib.sha256()
    for name in names:
        total.update(name.encode() + b"\0" + (scratch.ROOT / name).read_bytes())
    return total.hexdigest()[:16]


def observe(cache: Path, work: Path, jobs: int) -> Observed:
    """Run the test files whose observation is not in `cache` yet, `jobs` at a time, and return all of it."""
    files = scratch.files_of_tree()
    tests = [name for name in files if Path(name).name.startswith("test_") and not name.startswith("tests/chaos")]
    shared = [
        name
        for name in files
        if name.endswith(".py") and (name.startswith(("src/", "tests/support/")) or Path(name).name == "conftest.py")
    ]
    common = digest(shared)
    places = {test: cache / f"{digest([test])}-{common}.json" for test in tests if test.startswith("tests/")}
    missing = [test for test, place in places.items() if not place.exists()]
    if missing:
        print(f"observing {len(missing)} of {len(places)} test files", flush=True)
        _run(missing, places, work, jobs)
    return _load(places)


def _run(missing: list[str], places: dict[str, Path], work: Path, jobs: int) -> None:
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for test in missing:
        waiting.put(test)

    def serve(number: int) -> None:
        tester = Tester(work / f"observed-{number}", observed=True)
        assert tester.recorder is not None
        while True:
            try:
                test = waiting.get_nowait()
            except queue.Empty:
                break
            answer = tester.run([test], limit_s=_FILE_LIMIT_S)
            failed = [result["id"] for result in answer["results"] if result["outcome"] == "failed"]
            if failed:  # perhaps from the load of the machine
                again = {result["id"]: result for result in tester.run(failed, limit_s=_FILE_LIMIT_S)["results"]}
                answer["results"] = [again.get(result["id"], result) for result in answer["results"]]
            for result in answer["results"]:
                hits = tester.recorder.lines(result["lines"])
                result["lines"] = {
                    Path(name).relative_to(tester.folder / "tree").as_posix(): ran for name, (ran, _) in hits.items()
                }
            places[test].parent.mkdir(parents=True, exist_ok=True)
            partial = places[test].with_suffix(".part")
            partial.write_text(json.dumps(answer["results"]))
            partial.rename(places[test])
            seconds = sum(result["seconds"] for result in answer["results"])
            print(f"  {test}: {len(answer['results'])} tests, {seconds:.1f} s, code {answer['code']}", flush=True)
        tester.close()

    run_side_by_side(serve, jobs)


def _load(places: dict[str, Path]) -> Observed:
    observed = Observed()
    for place in places.values():
        for result in json.loads(place.read_text()):
            if result["outcome"] == "passed":
                lines = ((name, line) for name, numbers in result["lines"].items() for line in numbers)
                observed.add(result["id"], result["seconds"], lines)
            elif result["outcome"] == "failed":
                observed.failed.append(result["id"])
    return observed
