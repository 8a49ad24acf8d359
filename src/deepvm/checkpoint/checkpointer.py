"""The trainer's side: three lines in a training loop."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from deepvm import variables
from deepvm.checkpoint import environment, ranks
from deepvm.checkpoint.capture import join
from deepvm.checkpoint.deciding import Deciding, NoticeFile
from deepvm.checkpoint.determinism import DETERMINISM, Determinism
from deepvm.checkpoint.fetched import fetched_first
from deepvm.checkpoint.handle import SaveHandle, Status
from deepvm.checkpoint.loading import RESERVED
from deepvm.checkpoint.on_demand import OnDemand
from deepvm.checkpoint.plain import PlainTransfer
from deepvm.checkpoint.replay import Step, Witnesses, replay_step
from deepvm.checkpoint.restore import Restored, restore_newest
from deepvm.checkpoint.sending import Sending
from deepvm.checkpoint.taking import Taking, optimizers
from deepvm.checkpoint.tiers import Tiers
from deepvm.checkpoint.timeline import Start, Timeline
from deepvm.checkpoint.told import Told
from deepvm.checkpoint.transfer import MemoryTransfer
from deepvm.checkpoint.use_order import USE_ORDER, UseOrder
from deepvm.errors import CheckpointError, OverBudget, UsageError
from deepvm.policy import Moment, Retention, SavePolicy
from deepvm.store.base import Store
from deepvm.store.memory import MemoryStore

log = logging.getLogger("deepvm.checkpoint")


class Checkpointer:
    """Saves state into stores while training goes on, and restores the newest that is whole.

    ``state`` maps names to things with ``state_dict``/``load_state_dict``, or to plain values and tensors. Optimizers
    among them are told to wait (through their own pre-hook) only for what is neither copied nor sent when they step.

    What is not given comes from the environment, as ``deepvm run`` sets it: ``store`` from DEEPVM_STORE, ``run`` from
    DEEPVM_RUN (else "default"), ``policy`` from DEEPVM_POLICY (else "every 60s"), ``token`` from DEEPVM_TOKEN, ``key``
    from DEEPVM_RUN_KEY. With ``live=False`` save() copies the whole state before it returns, and nothing is read later.
    Where DEEPVM_NOTICE_FILE is set, a notice in it makes all ranks save, whatever the policy.
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
        live: bool = True,
    ) -> None:
        if on_error not in ("log", "raise") or on_busy not in ("skip", "wait"):
            raise UsageError(f"on_error is log or raise, on_busy skip or wait; not {on_error!r}, {on_busy!r}")
        if taken := [name for name in state if name.startswith(RESERVED)]:
            raise UsageError(f"{taken[0]!r}: names that begin with {RESERVED!r} are our own, call it something else")
        self._use_order = UseOrder(state)
        self.state = dict(state)
        self.run = run = environment.the_run(run)
        self.policy = environment.the_policy(policy)
        self.retention = retention or Retention()
        self._stores = environment.the_stores(store, token=token, key=key)
        self._deadline_s, self._on_busy = deadline_s, on_busy
        self._rank, self._world_size = ranks.rank_and_world_size()
        first = self._stores[0]
        if isinstance(first, MemoryStore):
            first.session = ranks.shared_session(first.session)
            self._transfer: MemoryTransfer | PlainTransfer = MemoryTransfer(first, run, self._rank, self._world_size)
        else:
            self._transfer = PlainTransfer(first, run, self._rank, self._world_size)
        self._taking = Taking(self._transfer.block_bytes, self._transfer.copies, self._world_size, live=live)
        self._taking.budget_bytes = memory_budget_bytes
        self._determinism = Determinism(self.state, self._rank, self._world_size)
        self.restored: Restored | None = None  # what the last restore took, and what it passed over
        self._on_demand: OnDemand | None = None
        self._handle: SaveHandle | None = None
        self._status = Status()
        self._started_s = self._last_saved_s = self._last_step_s = time.monotonic()
        self._last_saved_step = 0
        self._replay, self._replaying = replay, False
        self._witnesses = None if replay is None else Witnesses(self._stores, run, self._status, deadline_s)
        self._told = Told(environment.told(variables.EVENTS), self._rank, self._world_size)
        notice_file = environment.told(variables.NOTICE_FILE)
        self._notices = NoticeFile(notice_file)
        self._deciding = Deciding(self.policy, self._world_size, expects_notices=notice_file is not None)
        self._notice_ends_s: float | None = None
        self._noticed_s = 0.0
        self._tiers = Tiers(
            self._stores,
            run,
            self._rank,
            self._told,
            retention=self.retention,
            status=self._status,
            deadline_s=deadline_s,
            witnesses=self._witnesses,
        )
        self._sending = Sending(
            self._transfer,
            self._taking,
            self._determinism,
            self._tiers,
            self._told,
            place=first.url,
            status=self._status,
            deadline_s=deadline_s,
            raises=on_error == "raise",
        )
        self._hooks = [o.register_step_pre_hook(self._before_step) for o in optimizers(self.state)]
        self._start = Start(optimizers(self.state), in_group=self._world_size > 1)
        with suppress(Exception):  # as above
            self._taking.warm_up(self.state)
        self._attempts = 0
        self._closed = False

    # --- saving -------------------------------------------------------------------------------------------------

    def step(self, step: int) -> SaveHandle | None:
        """Tell that a training step is finished; saves when the policy says so."""
        if self._replaying:
            return None
        now_s = time.monotonic()
        seconds, self._last_step_s = now_s - self._last_step_s, now_s
        self._start.stepped()
        self._told.stepped(step, seconds)
        self._sending.raise_problem()
        self._look(step)
        announced_s = self._notices.seconds_left()
        if announced_s is not None:
            self.notice(announced_s)
        if self._deciding.due(self._moment(step), seconds) or self._sending.to_be_repeated(self._world_size):
            handle = self.save(step)
            self._end_with(handle)
            return handle
        with suppress(Exception):  # a state that cannot be saved is told when it is
            self._taking.warm_up(self.state)
        return None

    def save(self, step: int) -> SaveHandle:
        """Take a snapshot and send it in the background. Returns at once; skipped where the last one is under way."""
        self._sending.raise_problem()
        if self._closed:
            raise UsageError("this checkpointer is closed")
        self._attempts += 1  # the same on every rank, since all call save() alike
        handle = SaveHandle(step, self._attempts)
        if self._replaying:
            self._sending.skipped(handle, "a step is replayed", told=False)
            return handle
        self._look(step)
        idle = self._sending.wait_idle(0.0 if self._on_busy == "skip" else self._deadline_s)
        if not (idle if self._world_size == 1 else ranks.all_of(idle)):
            self._sending.skipped(handle, f"step {self._handle.step if self._handle else '?'} is still being sent")
            return handle
        try:
            self.finish_restore()
            snapshot, skeletons = self._taking.take(self._components())
        except OverBudget as error:
            self._sending.skipped(handle, str(error))
            return handle
        except Exception as error:  # of the user's own state_dict(), too: training goes on
            self._sending.failed(handle, error)
            return handle
        self._sending.begin(snapshot)
        self._status.taken += 1
        self._last_saved_step, self._last_saved_s = step, time.monotonic()
        self._handle = handle
        if self._witnesses is not None:
            self._witnesses.expect(handle)
        handle.stall_s = time.perf_counter() - handle.began_s
        extra: dict[str, bytearray] | str = skeletons
        if self._world_size > 1 and isinstance(self._transfer, PlainTransfer):  # it has no node where ranks could meet
            extra = ", ".join(ranks.gather_texts(join(skeletons)))
        self._sending.put(snapshot, handle, extra)
        return handle

    def _end_with(self, handle: SaveHandle) -> None:
        """Where the run is interrupted, it ends with this save: steps after it would be lost. Waits for that end."""
        if not self._notices.interrupts or self._notice_ends_s is None or handle.state in ("skipped", "failed"):
            return
        self._before_step()  # what is not sent yet is copied, and training may be ended at any time
        while time.monotonic() < self._notice_ends_s and handle.state != "failed":
            time.sleep(0.05)

    def settle(self) -> None:
        """Copy now what a save under way still reads in place. After it, parameters may be changed in any way, and the
        save is not disturbed: for evaluation with averaged weights, and wherever else weights are swapped."""
        snapshot, handle = self._sending.snapshot, self._handle
        if snapshot is None or handle is None or snapshot.frozen:
            return
        began = time.perf_counter()
        snapshot.freeze()
        self._sending.settled(snapshot)
        handle.stall_s += time.perf_counter() - began
        handle.advance("staged")

    def notice(self, seconds_left: float) -> None:
        """Tell that this machine will be taken away; policies that act at a notice see it at one of the next steps."""
        self._noticed_s = time.monotonic()
        self._notice_ends_s = self._noticed_s + seconds_left

    def timeline(self) -> Timeline:
        """The stages of this process's start: print it, or draw it with ``.svg()``."""
        return self._start.timeline()

    def status(self) -> Status:
        staging = self._taking.staging
        self._status.staging_bytes = 0 if staging is None else staging.size_bytes
        return self._status

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what is under way, and let go of threads and connections."""
        if self._closed:
            return
        self._closed = True
        self._tiers.hurry()
        with suppress(CheckpointError):  # what did not come says so to whoever uses it
            self.finish_restore()
        for hook in self._hooks:
            hook.remove()
        self._start.close()
        self._use_order.close()
        self._before_step()
        self._sending.end()
        self._sending.join(timeout_s)
        self._tiers.join(timeout_s)
        if self._witnesses is not None:
            self._witnesses.close(timeout_s)
        self._transfer.close()
        self._taking.close()
        for store in self._stores:
            store.close()
        self._told.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _moment(self, step: int) -> Moment:
        now_s = time.monotonic()
        return Moment(
            step=step,
            now_s=now_s - self._started_s,
            last_saved_step=self._last_saved_step,
            last_saved_s=self._last_saved_s - self._started_s,
            notice_s_left=None if self._notice_ends_s is None else max(0.0, self._notice_ends_s - now_s),
            noticed_s=None if self._notice_ends_s is None else self._noticed_s - self._started_s,
            save_cost_s=self._status.last_save_s,
            save_took_s=self._status.last_save_s,
            under_way_for_s=None if self._sending.wait_idle(0.0) else now_s - self._last_saved_s,
        )

    def _before_step(self, *_: object) -> None:
        """The optimizer's pre-hook: copy what is live and not yet sent."""
        self._start.let_go()
        self._determinism.settle()
        self.settle()

    # --- restoring ----------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None, *, lazy: bool = False, verify: str | None = None) -> int | None:
        """Load the newest whole checkpoint that any store has (or the one of ``step``); None where there is none.

        With ``lazy`` it returns before the bytes are there: a module waits for its parameters when it first runs, the
        optimizer for its state when it first steps.

        With ``verify="replay"`` the step function is called once, what it computed is compared with the witness that
        was stored when the checkpoint was, and the checkpoint is loaded again. Raises where they are not the same."""
        if verify not in (None, "replay") or (verify is not None and self._replay is None):
            raise UsageError(f'verify is "replay", with Checkpointer(replay=step_function), or none; not {verify!r}')
        began_s = time.monotonic()
        restored = self._restore(step, lazy=lazy)
        if restored is not None and verify is not None:
            restored = self._verify_by_replay(restored)
        if restored is None:
            return None
        log.info("%s", restored)
        self.restored = restored
        if restored.drift:
            log.warning("step %d is restored, but the run will drift: %s", restored.step, "; ".join(restored.drift))
        self._last_saved_step, self._last_saved_s = restored.step, time.monotonic()
        self._last_step_s = self._last_saved_s
        self._told.restored(restored, self._last_step_s - began_s)
        return restored.step

    def restore_generators(self) -> None:
        """Set the generators once more to what restore() found. Only needed where an iterator is made after it, in the
        middle of an epoch, by a loader that is not among the state: making it draws from them."""
        self._determinism.restore_generators()

    def finish_restore(self) -> None:
        """Wait for all that restore(lazy=True) left on its way."""
        if self._on_demand is not None:
            self._on_demand.finish()
            self._on_demand = None

    def _restore(self, step: int | None, *, lazy: bool = False) -> Restored | None:
        self._before_step()  # what is under way is of the state as it is now
        if self._on_demand is not None:
            self._on_demand.abandon()
            self._on_demand = None
        self._determinism.forget()
        components = self._components()
        with self._start.restoring(), ExitStack() as stack:
            stack.enter_context(self._taking.warming.paused())
            stores = stack.enter_context(fetched_first(self._stores, self.run, self._start))
            restored = restore_newest(stores, self.run, components, step=step, lazy=lazy, deadline_s=self._deadline_s)
            if restored is not None and restored.on_demand is not None:
                self._on_demand = restored.on_demand
                self._on_demand.when_over(stack.pop_all().close)  # until then it reads from these stores
        if restored is None:
            return None
        self.state.update({name: components[name] for name in self.state})
        self._status.drift = self._determinism.resume(restored.facts)
        return dataclasses.replace(restored, drift=self._status.drift)

    def _verify_by_replay(self, restored: Restored) -> Restored | None:
        assert self._replay is not None  # noqa: S101 - asked before
        self._replaying = True
        try:
            replay_step(self._stores, self.run, restored.step, self._replay, self._components)
        finally:
            self._replaying = False
            again = self._restore(restored.step)  # training goes on from here, whatever was found
        return None if again is None else dataclasses.replace(again, replayed=True)

    def _components(self) -> dict[str, Any]:
        """The state, and what is saved with it unasked."""
        return {**self.state, DETERMINISM: self._determinism, USE_ORDER: self._use_order}

    def _look(self, step: int) -> None:
        """At the state after a step, where it is a witness."""
        self._determinism.settle()
        if self._witnesses is not None:
            self._witnesses.see(step, self._components())
