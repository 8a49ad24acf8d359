"""Follows a run from its first machine to its last: replaces what is lost, and writes down what happens.

It decides little: groups are the hub's, decisions are policies', machines the backend's.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deepvm.errors import DeepvmError, UsageError
from deepvm.runtime.backend import Backend, Change, NoCapacity
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.events import Event
from deepvm.runtime.faults import Faults
from deepvm.runtime.hub import Hub
from deepvm.runtime.ledger import Ledger
from deepvm.runtime.replan import Replanner
from deepvm.runtime.view import Place, View

TICK_S = 0.05
FAILURES = 3  # of a machine in a row, before anything trained on it
ASK_AGAIN_S = 5.0  # where the market has none
MOST_EVENTS = 10_000  # at once: machines are looked at in between
SILENT_S, NEVER_S = 10.0, 300.0  # a machine that is up and not with the hub any more, or never was
TRAINERS_STOP_S, KEEPERS_STOP_S = 5.0, 60.0  # keepers write on what only their memory has


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    outcome: Literal["finished", "failed", "interrupted"]
    why: str = ""
    errors: Mapping[str, str] = field(default_factory=dict)  # what failed workers said last, by machine


class Supervisor:
    def __init__(
        self,
        cluster: Cluster,
        *,
        run: str,
        backend: Backend,
        hub: Hub,
        ledger: Ledger,
        faults: Faults,
        replanner: Replanner | None = None,
        watch: Callable[[View], None] = lambda _: None,
        about: Mapping[str, Any] | None = None,
        end_now: Callable[[], None] = lambda: None,
        last_words: Callable[[str], str] = lambda _: "",
    ) -> None:
        """``end_now`` is called by ``hurry``, while the backend may wait for machines to end; ``last_words`` are a
        machine's."""
        self.cluster = cluster
        self._run, self._backend, self._hub, self._ledger, self._faults = run, backend, hub, ledger, faults
        self._replanner, self._watch, self._about = replanner, watch, dict(about or {})
        self._end_now, self._last_words = end_now, last_words
        self._places = {machine.name: Place(machine) for machine in cluster.machines}
        self._news: list[Event] = []
        self._training_since_s: float | None = None
        self._steps: list[tuple[float, int]] = []  # when which was finished, of the last seconds
        self._losses = self._world_size = 0
        self._asked: set[str] = set()  # machines that the backend knows
        self._ask_again_s: dict[str, float] = {}
        self._met: set[str] = set()  # machines that are up and were with the hub
        self._missed_s: dict[str, float] = {}  # since when those are not that are up
        self._given_up: set[str] = set()
        self.interrupted = self._hurry = False

    # --- from outside ---------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End the run soon; what is committed stays."""
        self.interrupted = True

    def hurry(self) -> None:
        """End it now: nothing more is written on."""
        self._hurry = True
        self._end_now()

    def follow(self) -> Outcome:
        """Until the run is over; afterwards no machine of it is left."""
        self._tell("run-started", **self._about)
        outcome = Outcome(outcome="failed", why="deepvm run ended by itself")
        try:
            self._ask_for(list(self.cluster.machines))
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
            if self.interrupted:
                return Outcome(outcome="interrupted", why="interrupted")
            self._take_events()
            for change in self._backend.poll():
                self._changed(change)
            if self._hub.finished.is_set():
                return Outcome(outcome="finished")
            if self._hub.failed is not None:
                return Outcome(outcome="failed", why=self._hub.failed, errors=dict(self._hub.failures))
            if (worn := self._worn_out()) is not None:
                return worn
            self._break_on_purpose()
            self._give_up_the_silent()
            self._ask_again()
            self._show()
            time.sleep(TICK_S)

    def _finish(self, outcome: Outcome) -> None:
        """Trainers first: what they still send is taken; then those that keep it, with time to write it on."""
        trainers = [m.name for m in self.cluster.machines if m.name in self._asked and not m.keeps]
        keepers = [m.name for m in self.cluster.machines if m.name in self._asked and m.keeps]
        self._take_events()
        self._stop(trainers, TRAINERS_STOP_S)
        self._stop(keepers, KEEPERS_STOP_S)
        self._backend.down()
        self._hub.stop()
        while self._take_events():
            pass
        for change in self._backend.poll():
            if change.state == "down":
                self._down(change)
        self._tell("run-ended", outcome=outcome.outcome, why=outcome.why)
        self._show()

    def _stop(self, names: Sequence[str], within_s: float) -> None:
        self._backend.down(names, within_s=0.0 if self._hurry else within_s)

    # --- machines -------------------------------------------------------------------------------------------------

    def _ask_for(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            try:
                self._backend.up([machine])
            except NoCapacity as error:
                self._without(machine, str(error))
                continue
            self._asked.add(machine.name)
            self._places[machine.name].state = "asked"
            self._places[machine.name].since_s = time.time()
            self._tell("machine-asked", machine.name, **about(machine))

    def _without(self, machine: Machine, why: str) -> None:
        """The market has none: plan anew with what there is, and ask again later where that finds nothing."""
        found = None if self._replanner is None else self._replanner.instead_of(self.cluster, machine, why)
        if found is None:
            self._ask_again_s[machine.name] = time.monotonic() + ASK_AGAIN_S
            return
        self.cluster, changes = found
        self._tell("replanned", machine.name, changes=list(changes))
        self._hub.want(self.cluster.machines)
        instead = {m.name: m for m in self.cluster.machines}
        if machine.name in instead:
            self._places[machine.name].machine = instead[machine.name]
            self._ask_for([instead[machine.name]])
        else:
            self._places.pop(machine.name, None)

    def _ask_again(self) -> None:
        due = [name for name, at_s in self._ask_again_s.items() if time.monotonic() >= at_s]
        for name in due:
            del self._ask_again_s[name]
            if name in self._places:
                self._ask_for([self._places[name].machine])

    def _changed(self, change: Change) -> None:
        place = self._places.get(change.machine)
        if place is None:
            return
        if change.state == "down" and change.machine in self._given_up:
            self._given_up.discard(change.machine)
            change = replace(change, why="lost")
        if change.state == "up":
            place.state, place.since_s, place.up_at_s = "up", change.at_s, change.at_s
            self._tell("machine-up", change.machine, at_s=change.at_s, **about(place.machine))
            return
        self._met.discard(change.machine)
        trained = self._down(change)
        self._hub.lost(change.machine)
        if change.why == "failed" and not trained:
            place.failures += 1
        elif change.why != "stopped":
            self._losses += 1
        if place.failures < FAILURES and not self._hub.finished.is_set() and self._hub.failed is None:
            self._ask_for([place.machine])

    def _down(self, change: Change) -> bool:
        """Write it down; whether the machine had trained."""
        place = self._places[change.machine]
        trained = place.state in ("training", "waiting", "notice")
        place.paid_usd, place.up_at_s = place.cost_usd(change.at_s), None
        place.state, place.since_s = "down", change.at_s
        self._tell("machine-down", change.machine, at_s=change.at_s, why=change.why, exit_code=change.exit_code)
        return trained

    def _give_up_the_silent(self) -> None:
        """A machine that hangs is up for its backend, and of no use to anybody: it is ended, and replaced."""
        now_s, connected = time.monotonic(), set(self._hub.connected)
        self._met |= connected
        up = {name for name, place in self._places.items() if place.up_at_s is not None}
        self._missed_s = {name: self._missed_s.get(name, now_s) for name in up - connected}
        for name, since_s in self._missed_s.items():
            if now_s - since_s > (SILENT_S if name in self._met else NEVER_S):
                self._given_up.add(name)
                self._backend.down([name], within_s=0.0)

    def _worn_out(self) -> Outcome | None:
        for name, place in self._places.items():
            if place.failures >= FAILURES:
                why = f"{name} failed {FAILURES} times before it was of use"
                return Outcome(outcome="failed", why=why, errors={name: self._last_words(name)})
        return None

    def _break_on_purpose(self) -> None:
        if self._training_since_s is None:
            return
        for fault in self._faults.due(time.time() - self._training_since_s, step=self._hub.progress.step or 0):
            for name in fault.machines:
                if name in self._places and self._places[name].up_at_s is not None:
                    with contextlib.suppress(UsageError):  # it has just ended by itself
                        self._backend.preempt(name, notice_s=fault.notice_s)

    # --- what is told ---------------------------------------------------------------------------------------------

    def _take_events(self) -> bool:
        """Whether there were any."""
        taken: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while len(taken) < MOST_EVENTS:
                taken.append(self._hub.events.get_nowait())
        for event in taken:
            self._seen(event)
        if taken:
            self._ledger.append(taken)
            self._news += taken
        return bool(taken)

    def _seen(self, event: Event) -> None:
        if event.kind == "group":
            self._world_size = int(event.data["world_size"])
            for name, place in self._places.items():
                if place.up_at_s is None:
                    continue
                place.failures = 0  # no group without all that keep checkpoints
                if name in event.data["machines"]:
                    place.state, place.since_s = "training", event.at_s
        elif event.kind == "step":
            if self._training_since_s is None:
                self._training_since_s = event.at_s
            self._steps = [*self._steps[-200:], (event.at_s, int(event.data["step"]))]
        elif event.kind == "notice" and event.machine in self._places:
            self._places[event.machine].state = "notice"

    def _tell(self, kind: str, machine: str | None = None, *, at_s: float | None = None, **data: Any) -> None:
        event = Event(at_s=time.time() if at_s is None else at_s, kind=kind, machine=machine, data=data)
        self._ledger.append([event])
        self._news.append(event)

    def _show(self) -> None:
        now_s, progress = time.time(), self._hub.progress
        recent = [at_s for at_s, _ in self._steps if now_s - at_s < 5.0]
        rate = (len(recent) - 1) / (recent[-1] - recent[0]) if len(recent) > 2 and recent[-1] > recent[0] else None
        news, self._news = self._news, []
        training = self._hub.round is not None
        for place in self._places.values():
            if place.state == "training" and not training:  # its group broke, and it waits for the next one
                place.state, place.since_s = "waiting", now_s
        self._watch(
            View(
                run=self._run,
                places=list(self._places.values()),
                step=progress.step,
                steps_per_s=rate,
                saved_step=progress.saved_step,
                saved_at_s=progress.saved_at_s,
                saved_place=progress.saved_place,
                world_size=self._world_size if training else 0,
                cost_usd=sum(place.cost_usd(now_s) for place in self._places.values()),
                losses=self._losses,
                news=news,
            )
        )


def about(machine: Machine) -> dict[str, Any]:
    return {
        "role": machine.role,
        "instance": machine.instance,
        "market": machine.market,
        "usd_per_hour": machine.usd_per_hour,
        "on_demand_usd_per_hour": machine.on_demand_usd_per_hour,
    }
