"""The folders of runs -> one line about each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from deepvm.errors import DeepvmError
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.sqlite_file import being_written
from deepvm.runtime.supervise.run_folder import RunFolder, all_runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    run: str
    on: str  # a backend
    state: str  # running, finished, failed, interrupted, broken-off, in the cloud; or why it cannot be read
    started_s: float | None
    script: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def all_overviews() -> Iterator[Overview]:
    """Yield all runs on this machine; one that cannot be read says so."""
    for found in all_runs():
        try:
            yield _overview(RunFolder.find(found.name))
        except (DeepvmError, LookupError, TypeError, AttributeError, ArithmeticError, ValueError, OSError) as error:
            yield Overview(run=found.name, on="?", state=f"cannot be read: {error}", started_s=None, script="")


def _overview(folder: RunFolder) -> Overview:
    settings = folder.checked_settings()
    on, script = str(settings["on"]), str(settings["settings"]["script"])
    if not folder.ledger.exists():
        return Overview(run=folder.name, on=on, state="not begun", started_s=None, script=script)
    with Ledger.open(folder.ledger) as ledger:
        starts = [event.at_s for event in ledger.events("run-started")]
        ends = [event for event in ledger.events("run-ended") if not starts or event.at_s >= starts[-1]]
    if ends:
        state = str(ends[-1].data.get("outcome"))
    elif being_written(folder.ledger):
        state = "running"
    else:
        state = "broken-off" if on == "local" else "in the cloud"
    return Overview(run=folder.name, on=on, state=state, started_s=starts[0] if starts else None, script=script)
