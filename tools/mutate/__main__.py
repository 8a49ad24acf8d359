"""`SEED=1 COUNT=300 JOBS=2 make mutate`: sample faults, run the tests that execute them, print those unnoticed.

`ONLY="policy/saving.py:107: store/memory/repair.py" make mutate` tries every fault of these lines or files instead.
`WITHIN="deepvm/plan/ deepvm/policy/" make mutate` samples faults of these folders or files.

Results are kept in `.mutate/`, so an interrupted run continues, and a fault that was noticed is not tried again until
its file changes. Exit 1 if less than 95 % were noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tools.mutate import excluded, observed, scratch
from tools.mutate.faults import Fault, faults_of, statement_lines
from tools.mutate.tester import Tester, run_side_by_side

_KEPT = scratch.ROOT / ".mutate"
_WANTED_SHARE = 0.95
_BATCHES_S = (2.0, 10.0, 50.0)  # of tests, nearest and fastest first; after the last one a fault counts as unnoticed
_SCRIPTS = {  # run without site-packages, so not observed: what starts them
    "src/deepvm/runtime/backends/local/subreaper.py": "src/deepvm/runtime/backends/local/process_tree.py",
}
_FILES_FIRST = 5  # test files of the first batch: importing them takes longer than their tests


@dataclass(frozen=True)
class Outcome:
    """What became of one fault: the test that noticed it, or "" and how many tests ran."""

    noticed_by: str
    tests: int
    seconds: float


def main() -> int:
    """Run what the environment asks for, and return the exit code."""
    seed, count, jobs = (int(os.environ.get(name, d)) for name, d in (("SEED", "1"), ("COUNT", "300"), ("JOBS", "2")))
    only = os.environ.get("ONLY", "").split()  # parts of `path:line:`: every fault there instead of a sample
    within = os.environ.get("WITHIN", "").split()  # parts of `path:line:`: a sample of the faults there
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copies are removed
    started = time.monotonic()
    texts = _sources()
    faults = [
        fault
        for name in texts
        for fault in faults_of(name, texts[name])
        if not excluded.reason(fault, texts[name]) and _among(fault, only) and _among(fault, within)
    ]
    sampled = faults if only else sample(faults, texts, seed, count)
    work = Path(tempfile.mkdtemp(prefix="deepvm-mutate-"))
    try:
        seen = observed.observe(_KEPT / "observed", work, jobs)
        for test in seen.failed:
            print(f"fails without any fault, so it is not used: {test}")
        outcomes = _try_all(sampled, Selection(texts, seen), seen, texts, work, jobs)
    finally:
        Tester.kill_all()
        shutil.rmtree(work, ignore_errors=True)
    return report(sampled, outcomes, time.monotonic() - started)


def _among(fault: Fault, parts: list[str]) -> bool:
    return not parts or any(part in fault.key for part in parts)


def sample(faults: list[Fault], texts: dict[str, str], seed: int, count: int) -> list[Fault]:
    """Choose lines of src by the seed, and one fault of each; a change elsewhere leaves the choice as it is."""
    by_line: dict[tuple[str, str, int], list[Fault]] = defaultdict(list)
    repeated: dict[tuple[str, str], list[int]] = defaultdict(list)
    lines_of = {path: text.splitlines() for path, text in texts.items()}
    for fault in faults:
        line = lines_of[fault.path][fault.line - 1].strip()
        alike = repeated[fault.path, line]
        if fault.line not in alike:
            alike.append(fault.line)
        by_line[fault.path, line, alike.index(fault.line)].append(fault)
    chosen = sorted(by_line, key=lambda place: _draw(seed, *place))[:count]
    return sorted(
        (min(by_line[place], key=lambda fault: _draw(seed, fault.column, fault.after)) for place in chosen),
        key=lambda fault: (fault.path, fault.line),
    )


def _draw(*values: object) -> str:
    """Return a random-looking word that depends on these values alone."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


class Selection:
    """Which tests may notice a fault: those that execute its statement, or what its statement defines."""

    def __init__(self, texts: dict[str, str], seen: observed.Observed) -> None:
        self._seen = seen
        self._mentions: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self._lines = {name: statement_lines(text) for name, text in texts.items()}
        for name, lines in self._lines.items():
            for line, words in lines.items():
                for word in words:
                    self._mentions[word].add((name, line))

    def tests(self, fault: Fault) -> list[str]:
        """Return ids of tests: those of the fault's own folder first, and the fastest of these first."""
        if starter := _SCRIPTS.get(fault.path):
            places = {(starter, line) for line in self._lines[starter]}
        elif fault.statements:
            places = {(fault.path, line) for line in fault.statements}
        else:
            places = {place for name in fault.names for place in self._mentions[name]}
            places = places or {(fault.path, line) for line in self._lines[fault.path]}
        found = set().union(*(self._seen.tests_at(*place) for place in places))
        own = str(Path(fault.path).parent).replace("src/deepvm", "tests", 1)
        return sorted(found, key=lambda test: (not test.startswith(own), self._seen.seconds[test], test))


def batches(tests: list[str], seconds: dict[str, float]) -> list[list[str]]:
    """Cut tests into runs of growing length; files of the first run are few."""
    made: list[list[str]] = []
    rest = tests
    for number, limit_s in enumerate(_BATCHES_S):
        batch: list[str] = []
        later: list[str] = []
        files: set[str] = set()
        total = 0.0
        for test in rest:
            file = test.split("::")[0]
            crowded = number == 0 and file not in files and len(files) >= _FILES_FIRST
            if crowded or (batch and total + seconds[test] > limit_s):
                later.append(test)
            else:
                batch.append(test)
                files.add(file)
                total += seconds[test]
        if batch:
            made.append(batch)
        rest = later
    return made


def _try(fault: Fault, tester: Tester, tests: list[str], seen: observed.Observed, text: str) -> Outcome:
    started, ran = time.monotonic(), 0
    changed = fault.apply(text)
    compile(changed, fault.path, "exec")
    tester.write(fault.path, changed)
    try:
        for batch in batches(tests, seen.seconds):
            waiting, patience = batch, 1
            while waiting:
                limit_s = patience * (60 + 4 * sum(seen.seconds[test] for test in waiting))
                answer = tester.run(waiting, limit_s=limit_s, times=seen.seconds)
                ran += len(answer["results"])
                if answer["code"] == 0:
                    break
                failing = next((each["id"] for each in answer["results"] if each["outcome"] == "failed"), "")
                if not failing:  # a time-out, a crash, or files that cannot be imported any more
                    tester.write(fault.path, text)
                    without = tester.run(waiting, limit_s=limit_s, times=seen.seconds)
                    tester.write(fault.path, changed)
                    if without["code"] is None:  # the machine is too busy: nothing is known yet
                        patience *= 2
                        continue
                    return Outcome(noticed_by=f"(code {answer['code']})", tests=ran, seconds=time.monotonic() - started)
                again = tester.run([failing], limit_s=60 + 4 * seen.seconds.get(failing, 1), times=seen.seconds)
                if again["code"] != 0:
                    return Outcome(noticed_by=failing, tests=ran, seconds=time.monotonic() - started)
                waiting = waiting[waiting.index(failing) + 1 :] if failing in waiting else []
    finally:
        tester.write(fault.path, text)
    return Outcome(noticed_by="", tests=ran, seconds=time.monotonic() - started)


def _try_all(
    sampled: list[Fault], selection: Selection, seen: observed.Observed, texts: dict[str, str], work: Path, jobs: int
) -> dict[str, Outcome]:
    tests = observed.digest(name for name in scratch.files_of_tree() if name.startswith("tests/"))
    sources = {path: hashlib.sha256(text.encode()).hexdigest()[:16] for path, text in texts.items()}
    kept = _KEPT / "outcomes.jsonl"
    outcomes: dict[str, Outcome] = {}
    if kept.exists():
        for line in kept.read_text().splitlines():
            values = json.loads(line)
            same_source = sources.get(values["key"].split(":")[0]) == values["of_source"]
            if same_source and (values["noticed_by"] or values["of_tests"] == tests):
                outcomes[values["key"]] = Outcome(values["noticed_by"], values["tests"], values["seconds"])
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    left = [fault for fault in sampled if fault.key not in outcomes]
    for fault in left:
        waiting.put(fault)
    print(f"{len(sampled)} faults, {len(left)} to try; {len(seen.seconds)} tests", flush=True)
    writing = threading.Lock()

    def serve(number: int) -> None:
        tester: Tester | None = None
        while True:
            try:
                fault = waiting.get_nowait()
            except queue.Empty:
                break
            tests_of_fault = selection.tests(fault)
            if tests_of_fault:
                tester = tester or Tester(work / f"fault-{number}", observed=False)
                outcome = _try(fault, tester, tests_of_fault, seen, texts[fault.path])
            else:
                outcome = Outcome("", 0, 0.0)
            with writing:
                outcomes[fault.key] = outcome
                about = {"key": fault.key, "of_source": sources[fault.path], "of_tests": tests}
                line = json.dumps(about | vars(outcome))
                with kept.open("a") as file:
                    file.write(line + "\n")
                said = f"noticed by {outcome.noticed_by}" if outcome.noticed_by else "UNNOTICED"
                print(f"{fault.key}: {said} ({outcome.tests} tests, {outcome.seconds:.1f} s)", flush=True)
        if tester:
            tester.close()

    run_side_by_side(serve, jobs)
    return outcomes


def report(sampled: list[Fault], outcomes: dict[str, Outcome], seconds: float) -> int:
    """Print the unnoticed faults and the share of the others; return 1 if that is too small."""
    missed = sorted((fault for fault in sampled if not outcomes[fault.key].noticed_by), key=lambda fault: fault.key)
    if missed:
        print("\nunnoticed:")
    for fault in missed:
        ran = outcomes[fault.key].tests
        print(
            f"  {fault.path}:{fault.line}  {fault.before}  ->  {fault.after}  ({f'{ran} tests' if ran else 'no test'})"
        )
    share = 1 - len(missed) / len(sampled)
    print(f"\n{len(sampled) - len(missed)} of {len(sampled)} faults noticed: {share:.1%}, in {seconds:.0f} s")
    return 0 if share >= _WANTED_SHARE else 1


def _sources() -> dict[str, str]:
    names = [name for name in scratch.files_of_tree() if name.startswith("src/") and name.endswith(".py")]
    return {name: (scratch.ROOT / name).read_text(encoding="utf-8") for name in names}


if __name__ == "__main__":
    sys.exit(main())
