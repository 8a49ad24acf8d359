"""Ranks as real processes that meet over gloo, forked from the template of processes.py."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepvm.checkpoint import Checkpointer, ResumableSampler, rank_agreement, ranks, share_of_batch, with_final_buckets
from deepvm.checkpoint.rank_agreement import RanksDiverged
from deepvm.errors import CheckpointError, UsageError
from deepvm.policy import AtNotice, EverySeconds
from deepvm.runtime.notices.files import write_notice
from tests.support.checkpoint.processes import Forked, Work, digest_of
from tests.support.waiting import wait_until

Result = dict[str, Any]


def _rank(pipe: Connection, rank: int, world_size: int, meeting: str, work: Callable[..., Result], words: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        told = work(rank, *words)
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        told = {"traceback": traceback.format_exc()}
    pipe.send(told)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(world_size: int, directory: Path, work: Callable[..., Result], *words: Any) -> list[Result]:
    """Run ``work(rank, *words)`` on every rank; what each tells."""
    meeting = directory / f"meeting-{os.getpid()}-{time.monotonic_ns()}"
    started = [Forked(_rank, rank, world_size, str(meeting), work, words) for rank in range(world_size)]
    try:
        told = [rank.receive(90) for rank in started]
    finally:
        for rank in started:
            rank.kill()
    problems = [one["traceback"] for one in told if "traceback" in one]
    assert not problems, "\n".join(problems)
    return told


# --- what ranks do ------------------------------------------------------------------------------------------------


def replicated(rank: int, width: int = 400) -> Work:
    """The same on every rank, as after an all-reduce, but for the loader's position."""
    work = Work(width)
    work.step()
    work.state["position"] = {"index": 10**rank, "seen": list(range(rank * 700))}
    return work


def save_once(rank: int, url: str, step: int) -> Result:
    work = replicated(rank)
    truth = digest_of(work.model, work.optimizer, "")
    with Checkpointer(work.state, url, deadline_s=30) as ckpt:
        handle = ckpt.save(step)
        work.step()  # at once, on every rank
        handle.wait("remote", 40)
        return {"sent": handle.bytes_sent, "truth": truth}


def save_often(rank: int, url: str, saves: int) -> Result:
    """Without waiting, so that ranks are busy at different times; a save is skipped on all or on none."""
    work = replicated(rank)
    states = []
    with Checkpointer(work.state, url, deadline_s=30) as ckpt:
        for step in range(saves):
            work.state["position"]["index"] = step
            ckpt.state["position"] = {"index": step + rank, "seen": ["x" * step * (100 if rank else 1)]}
            handle = ckpt.save(step)
            time.sleep(0.01 * rank)
            work.step()
            states.append(handle)
        last = ckpt.status()
        for handle in states:
            if handle.state not in ("skipped", "failed"):
                handle.wait("remote", 40)
        return {"states": [h.state for h in states], "reasons": [h.reason for h in states], "error": last.last_error}


def restore(rank: int, url: str) -> Result:
    work = Work(400)
    state = {**work.state, "position": {}}
    with Checkpointer(state, url) as ckpt:
        step = ckpt.restore()
        return {"step": step, "position": ckpt.state["position"], "digest": digest_of(work.model, work.optimizer, "")}


def save_different_layouts(rank: int, url: str) -> Result:
    state = {"model": torch.nn.Linear(30, 30 + rank)}
    with Checkpointer(state, url, deadline_s=20) as ckpt:
        handle = ckpt.save(1)
        return {"state": handle.state, "reason": handle.reason}


def save_below_what_is_there(rank: int, url: str) -> Result:
    """Without restore(), then after one that goes back behind the newest."""
    work = replicated(rank)
    with Checkpointer(work.state, url, deadline_s=30) as ckpt:
        refused = ckpt.save(5)
        ckpt.restore(7)
        branch = ckpt.save(8)
        branch.wait("remote", 40)
        return {"state": refused.state, "reason": refused.reason, "branch": branch.state}


class Odd:
    def __init__(self, value: object = None) -> None:
        self.value = object() if value is None else value

    def state_dict(self) -> dict[str, object]:
        return {"odd": self.value}


def save_what_one_rank_cannot(rank: int, url: str) -> Result:
    state: dict[str, Any] = {"model": torch.nn.Linear(30, 30), "own": Odd() if rank == 1 else Odd(3)}
    with Checkpointer(state, url, deadline_s=20) as ckpt:
        first = ckpt.save(1)
        state["own"].value = 4
        second = ckpt.save(2)
        second.wait("remote", 30)
        return {"state": first.state, "reason": first.reason}


def decide_by_time(rank: int, url: str) -> Result:
    """Clocks that are apart: rank 1 is late at every step."""
    work = replicated(rank)
    with Checkpointer(work.state, url, policy=EverySeconds(0.1), on_busy="wait", deadline_s=30) as ckpt:
        saved = []
        for step in range(1, 20):
            time.sleep(0.02 + 0.02 * rank * (step % 3 == 0))
            if ckpt.step(step) is not None:
                saved.append(step)
        return {"saved": saved}


def notice_on_one_rank(rank: int, url: str) -> Result:
    work = replicated(rank)
    with Checkpointer(work.state, url, policy=AtNotice(again_after_s=0.001), on_busy="wait", deadline_s=30) as ckpt:
        saved = []
        for step in range(1, 31):
            if step == 3 and rank == 1:
                ckpt.notice(120.0)
            if ckpt.step(step) is not None:
                saved.append(step)
        return {"saved": saved}


def notice_in_a_file(rank: int, url: str, folder: str) -> Result:
    """Only one machine may be taken away, and only there a file is looked at."""
    path = Path(folder) / "notice"
    if rank == 1:
        os.environ["DEEPVM_NOTICE_FILE"] = str(path)
    os.environ["DEEPVM_EVENTS"] = f"{folder}/events.{rank}"
    work = replicated(rank)
    with Checkpointer(work.state, url, policy="every 40 steps", on_busy="wait", deadline_s=30) as ckpt:
        ckpt._pace._last_saved_s -= 60  # a save that is younger than 15 s would be good enough
        handles = []
        for step in range(1, 51):
            if step == 3 and rank == 1:
                write_notice(path, seconds_left=120.0)
            handle = ckpt.step(step)
            if handle is not None:
                handles.append(handle)
        for handle in handles:
            handle.wait("remote", 40)
        return {"saved": [handle.step for handle in handles]}


def share_a_batch(rank: int, global_batch: int, planned: int) -> Result:
    share = share_of_batch(global_batch, planned_world_size=planned)
    sampler = ResumableSampler(range(1000), global_batch=share.global_batch)
    return {"own": len(next(iter(sampler))), "per_rank": share.per_rank, "accumulate": share.accumulate}


def save_into_files(rank: int, url: str) -> Result:
    work = replicated(rank)
    with Checkpointer(work.state, url) as ckpt:
        ckpt.save(5).wait("remote", 40)
    return {}


def save_a_step_again(rank: int, stores: list[str], folder: str) -> Result:
    """Rank 0's second save of a step, or its copy into the further store, waits until rank 1 has looked at its own."""
    looked, work = Path(folder) / "looked", replicated(rank)
    reached = "remote" if len(stores) == 1 else "durable"
    with Checkpointer(work.state, stores) as ckpt:
        ckpt.save(1).wait("durable", 40)
        work.step()
        if rank == 0:
            writer = ckpt._stores[-1].writer

            def late(*words: Any, **named: Any) -> Any:
                wait_until(looked.exists, 40)
                return writer(*words, **named)

            ckpt._stores[-1].writer = late  # type: ignore[method-assign]
        handle = ckpt.save(1)
        if rank == 1:
            with suppress(CheckpointError):
                handle.wait(reached, 1.0)
        early = handle.state == reached
        if rank == 1:
            looked.touch()
        handle.wait("durable", 40)
        return {"early": early}


def die_in_the_middle(rank: int, url: str) -> Result:
    """Rank 1 never sends: the others hear of it within their deadline, and what was committed stays."""
    work = replicated(rank)
    with Checkpointer(work.state, url, deadline_s=3) as ckpt:
        ckpt.save(1).wait("remote", 30)
        if rank == 1:
            ckpt._transfer.save = _broken  # type: ignore[method-assign]
        handle = ckpt.save(2)
        wait_until(lambda: handle.state in ("remote", "failed"), "the save's end", timeout_s=12)
        return {"state": handle.state, "reason": handle.reason}


def _broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("this rank is broken")


# --- chance -------------------------------------------------------------------------------------------------------


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Noisy:
    """Training that draws from every generator in every step."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.4), torch.nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.losses: list[float] = []
        self.hidden = 0.0  # that is no part of the state

    def step(self) -> None:
        self.optimizer.zero_grad()
        data = torch.randn(4, 8) * random.random() + float(np.random.normal()) + self.hidden
        loss = self.model(data).square().mean()
        loss.backward()
        own = loss.item()
        if dist.is_initialized():
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.losses.append(own)

    def digest(self) -> str:
        return digest_of(self.model, self.optimizer, "")


def noisy_steps(rank: int, url: str, run: str, steps: int, save_at: int) -> Result:
    seed_all(5)  # the same model everywhere
    work = Noisy()
    seed_all(100 + rank)
    with Checkpointer(work.state, url, run=run, deadline_s=30) as ckpt:
        for step in range(1, steps + 1):
            work.step()
            if step == save_at:
                ckpt.save(step).wait("remote", 40)
    return {"losses": work.losses, "digest": work.digest()}


def noisy_resume(rank: int, url: str, run: str, steps: int) -> Result:
    seed_all(77)
    work = Noisy()
    with Checkpointer(work.state, url, run=run) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            work.step()
        return {"losses": work.losses, "digest": work.digest(), "drift": ckpt.status().drift}


def summed_steps(rank: int, url: str, run: str, steps: int, first_sums: str) -> Result:
    """DDP over gradients of any size, from the newest checkpoint on; ``first_sums``: settled, or as DDP begins."""
    seed_all(5)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 30))
    network = torch.nn.parallel.DistributedDataParallel(model)
    if first_sums == "settled":
        before = [torch.get_rng_state(), *(value.clone() for value in model.state_dict().values())]
        assert with_final_buckets(network) is network
        after = [torch.get_rng_state(), *model.state_dict().values()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed_all(100 + rank)
    with Checkpointer({"model": model, "optimizer": optimizer}, url, run=run, deadline_s=30) as ckpt:
        step = ckpt.restore() or 0
        for number in range(step + 1, step + steps + 1):
            optimizer.zero_grad()
            network(torch.randn(7, 40)).square().mean().backward()
            optimizer.step()
            if number == step + steps:
                ckpt.save(number).wait("remote", 40)
    return {"step": step, "digest": digest_of(model, optimizer, "")}


def witnessed(rank: int, url: str) -> Result:
    seed_all(5)
    work = Noisy()
    seed_all(100 + rank)
    with Checkpointer(work.state, url, run="witnessed", deadline_s=30, replay=work.step) as ckpt:
        for step in range(1, 4):
            work.step()
            if step == 2:
                ckpt.save(step).wait("remote", 40)
            else:
                ckpt.step(step)
    return {}


def replayed(rank: int, url: str, drawing: int) -> Result:
    work = Noisy()

    def step() -> None:
        work.step()
        if rank == drawing:
            torch.rand(1)

    with Checkpointer(work.state, url, run="witnessed", replay=step) as ckpt:
        try:
            ckpt.restore(verify="replay")
        except CheckpointError as error:
            return {"problem": str(error)}
    return {"problem": None}


# --- ranks that are not at the same call --------------------------------------------------------------------------


def diverge(rank: int, url: str, calls: list[str], patience_s: float) -> Result:
    """Each rank makes its own call; what it says of the others."""
    ranks.STEP_S, rank_agreement.WARN_S = patience_s, 0.2
    work = replicated(rank)
    told: Result = {"problem": None}
    ckpt = Checkpointer(work.state, url, policy="every 2 steps", deadline_s=20)
    try:
        if calls[rank] == "nothing":
            dist.recv(torch.zeros(1), 0)  # as it waits for gradients
        elif calls[rank] != "close":
            method, _, step = calls[rank].partition(" ")
            getattr(ckpt, method)(*([int(step)] if step else []))
    except RanksDiverged as error:
        told["problem"] = str(error)
    if "nothing" in calls and rank == 0:
        dist.send(torch.zeros(1), 1 - rank)
    ckpt.close(last_save=False)
    return told


def components_differ(rank: int, url: str) -> Result:
    state: dict[str, Any] = {"model": torch.nn.Linear(3, 3), "epoch": 1}
    if rank == 1:
        del state["epoch"]
    try:
        Checkpointer(state, url)
    except UsageError as error:
        return {"problem": str(error)}
    return {"problem": None}


def restore_another_model(rank: int, url: str) -> Result:
    """One rank has another model than the checkpoint is of."""
    model = torch.nn.Linear(3, 3 + rank)
    with Checkpointer({"model": model}, url) as ckpt:
        try:
            ckpt.restore()
            return {"problem": None}
        except CheckpointError as error:
            return {"problem": str(error)}


def save_a_small_model(rank: int, url: str) -> Result:
    with Checkpointer({"model": torch.nn.Linear(3, 3)}, url) as ckpt:
        ckpt.save(4).wait("remote", 30)
    return {"rank": rank}


def tensor_on_one_rank(rank: int, url: str) -> Result:
    state = {"model": torch.nn.Linear(3, 3), "meter": {"best": torch.tensor(1.0) if rank == 0 else 1.0}}
    with Checkpointer(state, url) as ckpt:
        reasons = {str(ckpt.save(step).reason) for step in range(1, 4)}
    return {"reasons": sorted(reasons)}


def last_step_after_the_group(rank: int, url: str) -> Result:
    """A short run whose process group is destroyed before its checkpointer is closed."""
    work = replicated(rank)
    ckpt = Checkpointer(work.state, url, policy="every 100 steps")
    work.step()
    ckpt.step(1)
    dist.barrier()
    dist.destroy_process_group()
    ckpt.close()
    return {"newest": ckpt.status().last_remote_step}
