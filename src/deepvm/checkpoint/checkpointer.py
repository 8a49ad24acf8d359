"""The trainer's side, three lines in a training loop: decides when to save and restore; save/ and restorer.py do it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from deepvm.checkpoint import ranks
from deepvm.checkpoint.determinism.component import DETERMINISM, Determinism
from deepvm.checkpoint.determinism.replay import Step, Witnesses
from deepvm.checkpoint.ending import at_exit
from deepvm.checkpoint.ending.unsaved import Unsaved
from deepvm.checkpoint.handle import SaveHandle, Status
from deepvm.checkpoint.restore.newest import Restored
from deepvm.checkpoint.restore.selection import Wanted
from deepvm.checkpoint.restore.use_order import USE_ORDER, UseOrder
from deepvm.checkpoint.restorer import Restorer
from deepvm.checkpoint.save.durability import DurabilityWorker
from deepvm.checkpoint.save.event_log import EventLog
from deepvm.checkpoint.save.save_job import SaveJob
from deepvm.checkpoint.save.saver import Saver
from deepvm.checkpoint.save.schedule import NoticeFile, Pace, SaveSchedule
from deepvm.checkpoint.save.step_order import StepOrder
from deepvm.checkpoint.serialized_calls import NESTED, Turns, in_turn
from deepvm.checkpoint.setup import prepare, whole_step
from deepvm.checkpoint.snapshot.snapshotter import Snapshotter
from deepvm.checkpoint.state.own_state import StepHooks
from deepvm.checkpoint.state.owners import optimizers
from deepvm.checkpoint.timeline import Start, Timeline
from deepvm.errors import CheckpointError, OverBudget, UsageError
from deepvm.policy import Retention, SavePolicy
from deepvm.store.base import Store


class Checkpointer:
    """Save state into stores while training continues, and restore the newest whole checkpoint.

    ``state`` maps names to objects with ``state_dict``/``load_state_dict``, or to plain values and tensors; it is read
    at each save, written by restore. Its optimizers wait, in their pre-hook, for what is neither copied nor sent.

    Defaults come from the environment, as ``deepvm run`` sets it: ``store`` from DEEPVM_STORE, ``run`` from
    DEEPVM_RUN (else "default"), ``policy`` from DEEPVM_POLICY (else "every 60s"), ``token`` from DEEPVM_TOKEN, ``key``
    from DEEPVM_RUN_KEY. With ``live=False`` save() copies the whole state before it returns, and nothing is read later.
    If DEEPVM_NOTICE_FILE is set, a notice in it makes all ranks save, whatever the policy.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        store: str | Sequence[str] | Store | None = None,
        *,
        run: str | None = None,
        policy: SavePolicy | str | None = None,
        retention: Retention | None = None,
        key: str | None = None,
        token: str | None = None,
        memory_budget_bytes: int | None = None,
        deadline_s: float = 600.0,
        on_error: str = "log",
        on_busy: str = "skip",
        replay: Step | None = None,
        positions: Mapping[str, str] | None = None,
        live: bool = True,
    ) -> None:
        if on_error not in ("log", "raise") or on_busy not in ("skip", "wait"):
            raise UsageError(f"on_error is log or raise, on_busy skip or wait; not {on_error!r}, {on_busy!r}")
        setup = prepare(state, store, run=run, policy=policy, token=token, key=key)
        self.state, self._use_order, self._group, self._turns = state, UseOrder(state), setup.group, Turns()
        self.run, self.policy, self._stores = setup.run, setup.policy, setup.stores
        self.retention = retention or Retention()
        self._deadline_s, self._on_busy = deadline_s, on_busy
        self._rank, self._world_size = ranks.rank_and_world_size()
        self.place = (self.run, self._stores[0].url)
        self._older = at_exit.OlderCheckpointers(self.place)
        self._older.finish()
        self._transfer = setup.transfer(self._rank, self._world_size)
        self._snapshotter = Snapshotter(
            self._transfer.prepare, self._transfer.copies, self._world_size, live=live, budget_bytes=memory_budget_bytes
        )
        self._determinism = Determinism(self.state, self._rank, self._world_size, positions)
        self._status, self._pace, self._unsaved = Status(), Pace(), Unsaved(state)
        self._replay, self._attempts, self._closed = replay, 0, False
        self._witnesses = None if replay is None else Witnesses(self._stores, self.run, self._status, deadline_s)
        self._event_log = EventLog(setup.events, self._rank, self._world_size)
        self._notices = NoticeFile(setup.notice_file)
        self._schedule = SaveSchedule(self.policy, self._world_size, expects_notices=setup.expects_notices)
        self._order = StepOrder(self._stores, self.run, self.retention, self._rank, self._world_size)
        self._durability = DurabilityWorker(
            self._stores, self.run, self._rank, self._event_log,
            order=self._order, status=self._status, deadline_s=deadline_s, session=setup.session,
            witnesses=self._witnesses,
        )  # fmt: skip
        self._saver = Saver(
            self._transfer, self._snapshotter, self._determinism, self._durability, self._order, self._event_log,
            place=self.place[1], status=self._status, deadline_s=deadline_s, raises=on_error == "raise",
        )  # fmt: skip
        self._step_hooks = StepHooks(state, self._before_optimizer_step)
        self._start = Start(optimizers(self.state), in_group=self._world_size > 1)
        self._restorer = Restorer(
            self._stores, self.run, state, determinism=self._determinism, start=self._start,
            warming=self._snapshotter.warming, status=self._status, deadline_s=deadline_s,
        )  # fmt: skip
        with suppress(Exception):  # a state that cannot be saved is reported by the first save
            self._snapshotter.warm_up(self.state)
        self._kept_open: Sequence[object] = ()  # stores that a newer checkpointer uses
        at_exit.register(self)

    # --- saving -------------------------------------------------------------------------------------------------

    @in_turn
    def step(self, step: int) -> SaveHandle | None:
        """Call after each training step; saves if the policy says so."""
        if self._restorer.replaying or self._turns.nested:
            return None
        self._check_open()
        step, seconds = whole_step(step), self._pace.stepped()
        self._start.stepped()
        self._unsaved.stepped(step, arriving=self._restorer.unfinished)
        self._event_log.stepped(step, seconds)
        self._saver.raise_problem()
        self._observe(step)
        self._restorer.report_drift(self._determinism.stepped())
        if (announced_s := self._notices.seconds_left()) is not None:
            self._pace.notice(announced_s)
        under_way = not self._saver.wait_idle(0.0)
        status = self._status
        now = self._pace.moment(
            step, last_stall_s=status.last_stall_s, last_save_s=status.last_save_s, under_way=under_way
        )
        due = self._schedule.due(now, seconds)
        if due or self._saver.must_repeat(self._world_size):
            handle = self._save(step)
            if self._notices.interrupts:  # the run ends with this save: steps after it would be lost
                self._before_step()
                handle.wait_for_the_end(self._pace.notice_ends_s)
            return handle
        with suppress(Exception):  # as in the constructor
            self._snapshotter.warm_up(self.state)
        return None

    @in_turn
    def save(self, step: int) -> SaveHandle:
        """Take a snapshot and send it in the background. Returns at once; skipped while the last one is under way, and
        within another call, as from a signal handler: call it between steps."""
        step, self._unsaved.by_hand = whole_step(step), True
        return self._save(step)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this checkpointer is closed")

    def _save(self, step: int) -> SaveHandle:
        self._saver.raise_problem()
        self._check_open()
        self._attempts += not self._turns.nested  # the same on every rank, since all call save() alike
        handle = SaveHandle(step, self._attempts)
        if self._restorer.replaying or self._turns.nested:
            replaying = self._restorer.replaying
            self._saver.skipped(handle, "a step is replayed" if replaying else NESTED, logged=not replaying)
            return handle
        self._observe(step)
        idle = self._saver.wait_idle(0.0 if self._on_busy == "skip" else self._deadline_s)
        if not (idle if self._world_size == 1 else ranks.all_of(f"save({step})", idle)):
            newest = self._saver.newest
            self._saver.skipped(handle, f"step {newest.step if newest else '?'} is still being sent")
            return handle
        try:
            self._order.check_together(step)
            self.finish_restore()
            snapshot, skeletons = self._snapshotter.take(self.components())
            try:
                plain_values = self._transfer.plain_values(step, skeletons)
            except BaseException:
                snapshot.end()
                raise
        except OverBudget as error:
            self._saver.skipped(handle, str(error))
            return handle
        except ranks.RanksDiverged:
            raise
        except Exception as error:  # of the user's own state_dict(), too: training continues
            self._saver.failed(handle, error)
            return handle
        self._status.taken += 1
        self._pace.saved(step)
        if self._witnesses is not None:
            self._witnesses.expect(handle)
        handle.bytes_in_place = snapshot.bytes_in_place
        handle.stall_s = time.perf_counter() - handle.began_s
        self._saver.start(SaveJob(handle=handle, snapshot=snapshot, plain_values=plain_values))
        return handle

    @in_turn
    def settle(self) -> None:
        """Copy now what a save under way still reads in place. After it, parameters may be changed in any way without
        disturbing the save: for evaluation with averaged weights, or any other swap of weights."""
        self._saver.settle()

    def notice(self, seconds_left: float) -> None:
        """Announce that this machine will be preempted, to policies that act at a notice, at one of the next steps."""
        self._pace.notice(seconds_left)

    def timeline(self) -> Timeline:
        """Return the stages of this process's start: print it, or draw it with ``.svg()``."""
        return self._start.timeline()

    def status(self) -> Status:
        self._status.staging_bytes = self._snapshotter.staging_bytes
        return self._status

    @in_turn
    def close(self, timeout_s: float = 60.0, *, last_save: bool = True) -> None:
        """Save the last step if the policy did not, finish what is under way, release threads and connections.
        No last save if save() was called by hand, a witness would be missing, or the state was changed since step().
        A process that ends, also by an exception, does the same by itself, and waits ``deadline_s`` at most."""
        if self._closed or self._turns.nested:  # within another call: the process does it when it ends
            return
        at_exit.unregister(self)
        ends_s = time.monotonic() + timeout_s
        if last_save and self._replay is None:  # the last step has no witness
            self._unsaved.save(self._save, self._saver, self._group, ends_s)
        self._closed = True
        self._durability.finish_by(ends_s)
        with suppress(CheckpointError):  # what did not arrive raises when it is used
            self.finish_restore()
        self._step_hooks.remove()
        self._start.close()
        self._use_order.close()
        self._determinism.close()
        self._before_step()
        self._saver.finish(ends_s, f"it was not finished within the {timeout_s:g} s that close() waits")
        self._durability.join(max(0.0, ends_s - time.monotonic()))
        if self._witnesses is not None:
            self._witnesses.close(max(0.0, ends_s - time.monotonic()))
        if self._group is not None:
            self._group.leave("its Checkpointer is closed")
        self._transfer.close()
        self._snapshotter.close()
        self._event_log.close()
        for store in self._stores:
            if store not in self._kept_open:
                store.close()

    def finish_at_exit(self, *, failed: str) -> None:
        """Close at the end of the process, if close() was not called."""
        self._unsaved.failed = failed
        self.close(self._deadline_s)

    def give_way(self, stores: Sequence[object] = (), *, close: bool) -> None:
        """Finish what is under way, since a newer one of this run begins; close once that trains. Waits for no rank."""
        if close:
            self._kept_open = stores
            self.close(at_exit.GIVE_WAY_S, last_save=False)
        elif self._world_size == 1 and self._replay is None:
            ends_s = time.monotonic() + at_exit.GIVE_WAY_S
            with self._turns:
                self._unsaved.save(self._save, self._saver, None, ends_s)
            self._saver.wait_idle(at_exit.GIVE_WAY_S)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._unsaved.failed = "" if kind is None else kind.__name__
        self.close()

    @in_turn
    def _before_optimizer_step(self, *_: object) -> None:
        """Prepare for a write to the state: the optimizer's pre-hook."""
        self._unsaved.optimizer_steps()
        self._before_step()

    def _before_step(self) -> None:
        """Copy what is live and not yet sent."""
        self._start.remove_hooks()
        self._determinism.settle()
        self.settle()

    # --- restoring ----------------------------------------------------------------------------------------------

    @in_turn
    def restore(
        self,
        step: int | None = None,
        *,
        lazy: bool = False,
        verify: str | None = None,
        strict: bool = True,
        only: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> int | None:
        """Load the newest whole checkpoint that any store has (or the one of ``step``); None if there is none.
        With ``lazy`` it returns before the bytes arrive: a module waits for its parameters when it first runs, the
        optimizer for its state when it first steps. With ``verify="replay"`` the step function is called once, its
        result is compared with the stored witness, and the checkpoint is loaded again. Raises if they differ.
        ``only`` and ``exclude`` name components, or tensors of modules (``"model.head"``: all that begin so). What
        they leave out stays as it is; so does, without ``strict``, what the checkpoint lacks. See ``restored``."""
        wanted = Wanted(strict=strict, only=only, exclude=exclude)
        if verify not in (None, "replay") or (verify is not None and (self._replay is None or wanted != Wanted())):
            raise UsageError(f'verify is "replay" of all, with Checkpointer(replay=step_function), not {verify!r}')
        began_s = time.monotonic()
        step = None if step is None else whole_step(step)
        self._before_step()  # a save under way holds the state as it is now
        restored = self._restorer.restore(self.components(), step, lazy=lazy, wanted=wanted)
        if restored is not None and verify is not None and self._replay is not None:
            restored = self._restorer.verify(restored, self._replay, self.components)
        self._order.restored(restored.step if restored else None, restored.steps if restored else {}, self._attempts)
        if restored is None:
            return None
        restored.log()
        self._restorer.restored = restored
        self._unsaved = Unsaved(self.state)
        self._pace.restored(restored.step, restored.seconds)
        seconds = time.monotonic() - began_s
        self._event_log.restored(restored.step, seconds, place=restored.origin, fetched=restored.fetched)
        return restored.step

    @property
    def restored(self) -> Restored | None:
        """What the last restore loaded, and what it left out; None before the first."""
        return self._restorer.restored

    def restore_generators(self) -> None:
        """Set the generators once more to what restore() found. Only needed if a loader that is not in the state makes
        an iterator after it, in the middle of an epoch: that draws from them."""
        self._determinism.restore_generators()

    @in_turn
    def finish_restore(self) -> None:
        """Wait until all bytes of restore(lazy=True) have arrived."""
        self._restorer.finish()

    def components(self) -> dict[str, Any]:
        """Return the state, and what is always saved with it."""
        state = {**self._step_hooks.watch(), **self._unsaved.replaced}
        return {**state, DETERMINISM: self._determinism, USE_ORDER: self._use_order}

    def _observe(self, step: int) -> None:
        """Observe the state after a step: it may be a witness."""
        self._older.close(self._stores)
        self._determinism.settle()
        if self._witnesses is not None:
            self._witnesses.stepped(step, self.components())
