"""The options of ``deepvm run`` -> one value for a run: settings in its folder, and the job that machines receive."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepvm import strict_json as strict
from deepvm.errors import DeepvmError, UsageError
from deepvm.policy import parse_policy
from deepvm.policy.batch import BATCH_POLICIES, KEEP_GLOBAL
from deepvm.policy.conduct import Conduct
from deepvm.policy.loss import parse_after_loss
from deepvm.runtime.entry import Entry

if TYPE_CHECKING:
    from deepvm.runtime.cluster import Machine  # imports the planner, which a machine does not need

# of the document for the hub, and from it for each machine that joins
JOB_FIELDS = (
    "run", "script", "args", "policy", "after_loss", "batch", "planned_world_size", "memory_bytes", "durable",
    "max_restarts", "env", "module", "replicas",
)  # fmt: skip
_START_FIELDS = frozenset(
    {"run", "folder", "token_file", "hub", "planned_world_size", "replicas", "env"}
)  # not in the settings


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What to run and how. The last seven fields are filled in when the run starts."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False  # the script is a module's name, as after ``python -m``
    cwd: str = ""  # of the workers, on local machines; empty: that of deepvm run
    rank: int = 1  # of the plan's recommendations
    policy: str = Conduct().save
    after_loss: str = Conduct().after_loss
    batch: str = KEEP_GLOBAL
    preempt: str = ""
    seed: int = 0
    workers: int | None = None  # machines that train, at most
    memory_bytes: int | None = None  # of each memory node; None: by the plan's checkpoint size
    durable: str | None = None  # a store's URL
    max_restarts: int = 3  # of workers that fail by themselves
    isolate: bool = False
    bandwidth_bits_per_s: int | None = None
    steps: int | None = None  # of the whole training, for a plan's deadline; None: the plan's hours
    replan_threshold: float | None = None  # move if what is best is better by more than this share; None: never
    origins: Mapping[str, str] = field(default_factory=dict)  # who chose a policy: command line, plan or default
    run: str = ""
    folder: Path = Path()  # ledger, logs, token; on the machine where deepvm run was started
    token_file: Path = Path()
    hub: str = ""  # HOST:PORT
    planned_world_size: int = 1
    replicas: int = 1  # of each checkpoint, in as many memory nodes
    env: Mapping[str, str] = field(default_factory=dict)  # of every machine's processes

    def check(self) -> RunSpec:
        """Raise UsageError if this cannot be run; nothing has been started yet."""
        folder = self.cwd or os.getcwd()
        if not Path(folder).is_dir():
            raise UsageError(f"the run's folder {folder} does not exist: create it, or start a new run")
        Entry(script=self.script, args=self.args, module=self.module).check(folder)
        parse_policy(self.policy)
        parse_after_loss(self.after_loss)
        if self.batch not in BATCH_POLICIES:
            raise UsageError(f"unknown batch policy {self.batch!r}: choose {' or '.join(BATCH_POLICIES)}")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers is {self.workers}: at least one machine must train")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps is {self.steps}: training has at least one step")
        if self.bandwidth_bits_per_s is not None and not self.isolate:
            raise UsageError("--bandwidth needs isolated machines: add --isolate")
        if self.durable is not None:
            _check_durable(self.durable)
        return self

    def new_name(self) -> str:
        """Return a name made of the script and the time: digits-20261116-035012."""
        script = self.script.replace(".", "-") if self.module else Path(self.script).stem
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", script).strip("-.") or "run"
        return f"{stem[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"

    def with_absolute_paths(self) -> RunSpec:
        """Return the spec for a process in another folder."""
        folder = Path(self.cwd or os.getcwd()).resolve()
        script = self.script if self.module else str(Path(folder, self.script).resolve())
        durable = self.durable
        if durable is not None and "://" not in durable:
            durable = str(Path(folder, durable))
        return replace(self, script=script, cwd=str(folder), durable=durable)

    def to_settings(self) -> dict[str, Any]:
        """Return the user's options, for the run's folder."""
        kept = {name: value for name, value in asdict(self).items() if name not in _START_FIELDS}
        return {**kept, "args": list(self.args)}

    def to_job(self) -> dict[str, Any]:
        """Return the job, which the hub sends to machines."""
        return {**{name: getattr(self, name) for name in JOB_FIELDS}, "args": list(self.args), "env": dict(self.env)}

    def to_hub_document(self, machines: Iterable[Machine]) -> dict[str, Any]:
        """Return the job and its machines, for a hub that reads them from a file in a cloud."""
        return {**self.to_job(), "machines": [asdict(machine) for machine in machines]}

    @staticmethod
    def from_settings(document: Mapping[str, Any]) -> RunSpec:
        """Read the result of ``to_settings``; fields that another version did not have get their default. Raise
        MalformedJson if it is anything else."""
        found = {name: check(document[name], name) for name, check in _SETTINGS.items() if name in document}
        return RunSpec(**found | {"script": _text(strict.member(document, "script"), "script")})

    @staticmethod
    def from_job(document: Mapping[str, Any]) -> RunSpec:
        """Read the result of ``to_job``. Raise KeyError, TypeError or AttributeError if it is anything else."""
        env = {str(name): str(value) for name, value in document["env"].items()}
        return RunSpec(**{name: document[name] for name in JOB_FIELDS} | _args(document) | {"env": env})


def _args(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"args": tuple(map(str, document["args"]))}


def _text(value: Any, what: str) -> str:
    """Check text; a script's name and its arguments may have any character that a file's name may have."""
    if type(value) is not str or "\0" in value:
        raise strict.MalformedJson(f"{what} is {strict.brief(value)}, which is not text")
    return value


def _texts(value: Any, what: str) -> tuple[str, ...]:
    return tuple(_text(row, f"one of {what}") for row in strict.array(value, what))


def _optional(check: Callable[..., Any], *limits: float) -> Callable[[Any, str], Any]:
    return lambda value, what: None if value is None else check(value, what, *limits)


def _whole(least: int, most: int) -> Callable[[Any, str], int]:
    return lambda value, what: strict.integer(value, what, least, most)


def _origins(value: Any, what: str) -> dict[str, str]:
    return {name: _text(origin, f"{what}.{name}") for name, origin in strict.table(value, what).items()}


_SETTINGS: Mapping[str, Callable[[Any, str], Any]] = {
    "script": _text,
    "args": _texts,
    "module": strict.flag,
    "cwd": _text,
    "rank": _whole(1, 2**31),
    "policy": _text,
    "after_loss": _text,
    "batch": _text,
    "preempt": _text,
    "seed": _whole(-(10**300), 10**300),
    "workers": _optional(strict.integer, 1, 2**31),
    "memory_bytes": _optional(strict.integer, 0, 2**62),
    "durable": _optional(_text),
    "max_restarts": _whole(0, 2**62),
    "isolate": strict.flag,
    "bandwidth_bits_per_s": _optional(strict.integer, 1, 2**62),
    "steps": _optional(strict.integer, 1, 2**62),
    "replan_threshold": _optional(strict.number, 0, 1e9),
    "origins": _origins,
}  # what a run's folder has, by field


def _check_durable(url: str) -> None:
    from deepvm.store.urls import open_store

    if url.lower().startswith("memory:"):
        raise UsageError(f"--durable {url} is not durable: give a directory, file:// or s3://")
    try:
        open_store(url).close()
    except DeepvmError as error:
        raise UsageError(f"--durable {url}: {error}") from None
