"""A plan's machines on this host -> a finished run: replaces lost machines and records events.

The hub forms groups, policies decide, and the backend starts machines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deepvm.errors import DeepvmError, UsageError
from deepvm.events import Event
from deepvm.runtime.backends.base import Backend, Change
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.hub.durability import Durability, unsafe_step
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.ledger.journal import Journal
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.recovery import LOSSES
from deepvm.runtime.supervise.fault_injection import Faults
from deepvm.runtime.supervise.machine_requests import FAILURES, MachineRequests
from deepvm.runtime.supervise.moves.last_moment import LastMoment
from deepvm.runtime.supervise.moves.mover import STOP_S, Mover
from deepvm.runtime.supervise.replan import Replanner
from deepvm.runtime.supervise.run_state import NEEDS, RunState, View

TICK_S = 0.05
RETRY_S = 5.0  # if the market has none
RECONSIDER_S = 600.0  # between two looks at what is best now
MOST_EVENTS = 10_000  # at once: machines are polled in between
SILENT_S, NEVER_S = 10.0, 300.0  # for a machine that is up and lost its connection to the hub, or never had one
TRAINERS_STOP_S, KEEPERS_STOP_S = 20.0, 70.0  # after a stop message; keepers write what only their memory has
SAVE_S = 60.0  # for the save at an interruption
DURABLE_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    outcome: Literal["finished", "failed", "interrupted"]
    why: str = ""
    errors: Mapping[str, str] = field(default_factory=dict)  # the last output of failed workers, by machine


class Supervisor:
    def __init__(
        self,
        cluster: Cluster,
        *,
        backend: Backend,
        hub: Hub,
        ledger: Ledger,
        faults: Faults,
        replanner: Replanner | None = None,
        watch: Callable[[View], None] = lambda _: None,
        start_facts: Mapping[str, Any] | None = None,
        end_now: Callable[[], None] = lambda: None,
        tail_text: Callable[[str], str] = lambda _: "",
        durability: Durability | None = None,
        quote: Callable[[Machine], Machine] = lambda machine: machine,
        retry_s: float = RETRY_S,
        stop_requested: Callable[[], bool] = lambda: False,
        reconsider_s: float = RECONSIDER_S,
        last_moment: LastMoment | None = None,
    ) -> None:
        """``end_now`` is called by a second ``interrupt``, also while the backend waits for machines; ``tail_text``
        returns a machine's last output; ``durability`` waits for checkpoints; ``quote`` and ``retry_s`` are those of
        ``MachineRequests``; ``stop_requested`` returns True, once, if another process ends the run; ``last_moment``
        keeps a deadline."""
        self._requests = MachineRequests(
            cluster, backend, replanner=replanner, record=self._record, quote=quote, retry_s=retry_s
        )
        self._backend, self._hub, self._faults = backend, hub, faults
        self._journal, self._durability = Journal(ledger, self._warn), durability
        self._watch, self._start_facts = watch, dict(start_facts or {})
        self._end_now, self._tail_text, self._stop_requested = end_now, tail_text, stop_requested
        self._state = RunState(cluster.machines)
        self._machines = self._state.machines
        self._mover = Mover(
            self._requests, backend=backend, hub=hub, machines=self._machines, replanner=replanner,
            last_moment=last_moment, record=self._record, reconsider_s=reconsider_s,
        )  # fmt: skip
        self._news: list[Event] = []
        self._requested: set[str] = set()  # machines that the backend knows
        self._were_connected: set[str] = set()  # machines that are up and had a connection to the hub
        self._unconnected_since_s: dict[str, float] = {}  # machines that are up and have no connection
        self._ended_as_silent: set[str] = set()
        self.interrupted = self._stopping_now = False
        self._saving: tuple[int, float] | None = None  # at an interruption: the least step to save, and the deadline

    # --- from outside ---------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End the run after a save; at a second call at once, without waiting for checkpoints to become durable."""
        if self.interrupted:
            self._stopping_now = True
            self._end_now()
        self.interrupted = True

    @property
    def unwritten(self) -> Sequence[Event]:
        """Return events that the ledger could not take."""
        return self._journal.waiting

    def follow(self) -> Outcome:
        """Supervise until the run is over, and return its outcome; no machine is left then."""
        self._log("run-started", **self._start_facts)
        outcome = Outcome(outcome="failed", why="deepvm run ended by itself")
        try:
            self._mover.keep_deadline()
            for machine in self._requests.cluster.machines:
                self._requests.request([machine])
            outcome = self._loop()
        except DeepvmError as error:
            outcome = Outcome(outcome="failed", why=str(error))
        except KeyboardInterrupt:
            outcome = Outcome(outcome="interrupted", why="interrupted")
        finally:
            self._finish(outcome)
        return outcome

    # --- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> Outcome:
        while True:
            self._take_events()
            for change in self._backend.poll():
                self._changed(change)
            if self._hub.finished.is_set():
                return Outcome(outcome="finished")
            if not self.interrupted and self._stop_requested():
                self.interrupt()
            if self.interrupted and self._saved():
                return Outcome(outcome="interrupted", why="interrupted")
            if self._hub.failed is not None:
                return Outcome(outcome="failed", why=self._hub.failed, errors=dict(self._hub.failures))
            if (failed := self._failed_machine()) is not None:
                why = f"{failed} failed {FAILURES} times before it trained"
                return Outcome(outcome="failed", why=why, errors={failed: self._tail_text(failed)})
            self._inject_faults()
            self._end_silent_machines()
            if not self.interrupted:
                self._mover.reconsider()
            self._mover.end_moving()
            self._requests.request(self._requests.due())
            if (text := self._state.silent_script(self._hub.progress)) is not None:
                self._warn(text)
            self._journal.check()
            self._show()
            time.sleep(TICK_S)

    def _saved(self) -> bool:
        """True if an interrupted run can be ended: what was trained is saved, or cannot be."""
        if self._saving is None:
            step = self._hub.save_now(within_s=SAVE_S)
            if step is None:
                self._show_text("the run is interrupted, and has nothing to save; Ctrl-C again ends it at once")
                return True
            self._saving = step, time.monotonic() + SAVE_S
            self._show_text(f"the run is interrupted: saving step {step}, then it ends; Ctrl-C again ends it at once")
        step, until_s = self._saving
        progress = self._hub.progress
        if (progress.saved_step or 0) >= max(step, progress.step or 0) or self._hub.round is None or self._stopping_now:
            return True
        if time.monotonic() < until_s:
            return False
        self._warn(f"step {step} could not be saved within {SAVE_S:.0f} s: the run ends without it")
        return True

    def _finish(self, outcome: Outcome) -> None:
        """End trainers and take their last events; then end keepers, once the newest checkpoint is durable."""
        machines = [m for m in self._requests.cluster.machines if m.name in self._requested]
        trainers, keepers = [m.name for m in machines if not m.keeps], [m.name for m in machines if m.keeps]
        self._take_events()
        self._stop(trainers, TRAINERS_STOP_S)
        self._await_durable()
        self._stop(keepers, KEEPERS_STOP_S)
        self._backend.down()
        self._hub.stop()
        while self._take_events():
            pass
        self._take_ends()
        if outcome.outcome == "finished" and not self._hub.progress.alive:
            self._warn(f"the script never called deepvm, so nothing was checkpointed. It needs: {NEEDS}")
        self._log("run-ended", outcome=outcome.outcome, why=outcome.why)
        if lacking := self._journal.close():
            self._warn(f"the ledger lacks {lacking:,} events, which could not be written")
        self._show()

    def _stop(self, names: Sequence[str], within_s: float) -> None:
        """Ask machines to end, and kill those that do not."""
        self._hub.stop(names)
        until_s = time.monotonic() + within_s
        connected = set(self._hub.connected)
        while not self._stopping_now and time.monotonic() < until_s:
            self._take_events()
            self._take_ends()
            if not any(self._machines[name].up_at_s is not None for name in names if name in connected):
                break
            self._show()
            time.sleep(TICK_S)
        self._backend.down(names, within_s=0.0 if self._stopping_now else STOP_S)
        self._take_ends()

    def _take_ends(self) -> None:
        for change in self._backend.poll():
            if change.state == "down":
                self._requests.observe(change)

    def _await_durable(self) -> None:
        """Wait until the newest checkpoint is durable: memory nodes write it in the background."""

        def pause() -> bool:
            self._show()
            time.sleep(DURABLE_POLL_S)
            return not self._stopping_now

        step = unsafe_step(self._hub.progress)
        if step is None or self._durability is None:
            return
        made = self._durability.await_newest(self._hub.progress, pause)
        if made is None:
            self._warn(f"checkpoint {step} is not known to be durable: memory nodes alone may have it")
        else:
            self._log(made.kind, **made.data)

    # --- machines -------------------------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        view = self._machines.get(change.machine)
        if view is None:
            return
        if change.state == "down" and change.machine in self._ended_as_silent:
            self._ended_as_silent.discard(change.machine)
            change = replace(change, why="lost")
        trained = view.state in ("running", "training", "waiting", "notice")
        self._requests.observe(change)
        if change.state == "up":
            return
        self._were_connected.discard(change.machine)
        self._hub.lost(change.machine)
        self._mover.ended(change.machine)
        if change.why == "failed" and not trained:
            view.failures += 1
        elif change.why in LOSSES:
            self._state.losses += 1
        over = self._hub.finished.is_set() or self._hub.failed is not None or self.interrupted
        if view.failures < FAILURES and not over:
            self._mover.keep_deadline()
            self._requests.request([view.machine])

    def _end_silent_machines(self) -> None:
        """End machines that are up and not connected: a machine that hangs must be replaced."""
        now_s, connected = time.monotonic(), set(self._hub.connected)
        self._were_connected |= connected
        up = {name for name, view in self._machines.items() if view.up_at_s is not None}
        since_s = self._unconnected_since_s
        self._unconnected_since_s = {name: since_s.get(name, now_s) for name in up - connected}
        for name, at_s in self._unconnected_since_s.items():
            if now_s - at_s > (SILENT_S if name in self._were_connected else NEVER_S):
                self._ended_as_silent.add(name)
                self._backend.down([name], within_s=0.0)

    def _failed_machine(self) -> str | None:
        return next((name for name, view in self._machines.items() if view.failures >= FAILURES), None)

    def _inject_faults(self) -> None:
        since_s = self._state.training_since_s
        if since_s is None or self.interrupted:
            return
        for fault in self._faults.due(time.time() - since_s, step=self._hub.progress.step or 0):
            for name in fault.machines:
                view = self._machines.get(name)
                if view is not None and view.up_at_s is not None and not self._mover.is_hired(name):
                    with contextlib.suppress(UsageError):  # it has just ended by itself
                        self._backend.preempt(name, notice_s=fault.notice_s)

    # --- events -------------------------------------------------------------------------------------------------

    def _take_events(self) -> bool:
        """Take events from the hub. Return True if there were any."""
        taken = self._hub.take_events(MOST_EVENTS)
        for event in taken:
            self._state.observe(event)
            self._mover.observe(event)
        if taken:
            self._journal.append(taken)
            self._news += taken
        return bool(taken)

    def _show_text(self, text: str) -> None:
        """Show a text to the user without recording it."""
        self._news.append(Event.now("warning", text=text))

    def _warn(self, text: str) -> None:
        self._log("warning", text=text)

    def _log(self, kind: str, machine: str | None = None, **data: Any) -> None:
        self._record(Event.now(kind, machine, **data))

    def _record(self, event: Event) -> None:
        self._state.observe(event)
        self._mover.observe(event)
        if event.kind == "machine-asked" and event.machine is not None:
            self._requested.add(event.machine)
            asked = self._requests.machine(event.machine)
            if asked is not None:
                self._machines[asked.name].machine = asked
        elif event.kind == "replanned":
            self._mover.use(self._requests.cluster, event.machine)
        self._news.append(event)
        self._journal.append([event])

    def _show(self) -> None:
        news, self._news = self._news, []
        self._watch(self._state.view(self._hub.progress, training=self._hub.round is not None, news=news))
