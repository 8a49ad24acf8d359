"""What makes a resumed run another one is told: at the first save, and by the restore."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from deepvm.checkpoint import Checkpointer, resumable

DATA = torch.arange(5000)
Batch = Callable[[int], torch.Tensor]


class Loop:
    """nanoGPT's training loop: the batch of the next step is fetched between forward and backward."""

    def __init__(
        self,
        url: str,
        get_batch: Batch,
        *,
        ahead: bool,
        accumulate: int = 1,
        dropout: float = 0.0,
        evaluate_every: int = 0,
    ) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        layers = (torch.nn.Embedding(5000, 8), torch.nn.Dropout(dropout), torch.nn.Flatten(), torch.nn.LazyLinear(1))
        self.model = torch.nn.Sequential(*layers)
        self.model(torch.zeros(1, 4, dtype=torch.long))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ckpt = Checkpointer({"model": self.model, "optimizer": self.optimizer}, url, policy="every 1000 steps")
        self.get_batch, self.ahead, self.accumulate = get_batch, ahead, accumulate
        self.evaluate_every = evaluate_every

    def train(self, save_at: int, steps: int) -> list[float]:
        torch.manual_seed(5)
        step, losses = self.ckpt.restore() or 0, []
        batch = self.get_batch(step) if self.ahead else None
        while step < steps:
            if self.evaluate_every and step % self.evaluate_every == 0:
                for _ in range(6):
                    self.get_batch(step)
            for _ in range(self.accumulate):
                batch = self.get_batch(step) if not self.ahead else batch
                assert batch is not None
                loss = self.model(batch).square().mean()
                batch = self.get_batch(step + 1) if self.ahead else None
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
            self.ckpt.step(step)
            if step == save_at:
                self.ckpt.save(step).wait("durable", 30)
        self.ckpt.close()
        return losses


def drawn_by_torch(_: int) -> torch.Tensor:
    return torch.stack([DATA[i : i + 4] for i in torch.randint(len(DATA) - 4, (12,))])


def drawn_by_numpy(_: int) -> torch.Tensor:
    return torch.stack([DATA[i : i + 4] for i in (np.random.rand(12) * (len(DATA) - 4)).astype(int)])


def drawn_for_the_step(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.stack([DATA[i : i + 4] for i in torch.randint(len(DATA) - 4, (12,), generator=generator)])


@pytest.mark.parametrize(
    ("get_batch", "source"), [(drawn_by_torch, "torch"), pytest.param(drawn_by_numpy, "numpy", marks=pytest.mark.chaos)]
)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 4}, {"dropout": 0.2}, {"evaluate_every": 4}, {"evaluate_every": 5}]
)
def test_a_batch_that_is_fetched_ahead_of_the_step_is_reported_after_a_restore(
    tmp_path: Path, get_batch: Batch, source: str, options: dict[str, Any]
) -> None:
    url = f"file://{tmp_path}"
    undisturbed = Loop(url, get_batch, ahead=True, **options).train(save_at=6, steps=9)
    resumed = Loop(url, get_batch, ahead=True, **options)
    assert resumed.train(save_at=-1, steps=9) != undisturbed[6:]
    assert resumed.ckpt.restored is not None
    (drift,) = (reason for reason in resumed.ckpt.restored.drift if source in reason)
    assert "a batch that was fetched ahead of the step is lost" in drift
    assert resumed.ckpt.status().drift == resumed.ckpt.restored.drift


@pytest.mark.parametrize(
    ("get_batch", "ahead"), [(drawn_by_torch, False), (drawn_for_the_step, True), (drawn_for_the_step, False)]
)
@pytest.mark.parametrize("save_at", [1, 2, 6])
def test_a_batch_that_follows_from_its_step_or_is_fetched_in_it_drifts_nothing(
    tmp_path: Path, get_batch: Batch, ahead: bool, save_at: int
) -> None:
    url = f"file://{tmp_path}"
    undisturbed = Loop(url, get_batch, ahead=ahead, dropout=0.2).train(save_at=save_at, steps=9)
    resumed = Loop(url, get_batch, ahead=ahead, dropout=0.2)
    assert resumed.train(save_at=-1, steps=9) == undisturbed[save_at:]
    assert resumed.ckpt.restored is not None
    assert resumed.ckpt.restored.drift == ()


def test_a_batch_that_a_loader_hands_out_ahead_of_the_step_is_reported(tmp_path: Path) -> None:
    def train(save_at: int) -> Checkpointer:
        loader = resumable(DataLoader(TensorDataset(torch.randn(40, 3)), 2, shuffle=True), seed=0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        with Checkpointer(state, f"file://{tmp_path}", policy="every 1000 steps") as ckpt:
            step = ckpt.restore() or 0
            batches = iter(loader)
            (batch,) = next(batches)
            while step < 9:
                loss = model(batch).sum()
                (batch,) = next(batches)
                loss.backward()
                optimizer.step()
                step += 1
                ckpt.step(step)
                if step == save_at:
                    ckpt.save(step).wait("durable", 30)
        return ckpt

    train(save_at=6)
    (drift,) = train(save_at=-1).status().drift
    assert "took 2 batches from loader, a step of the saved run 1" in drift


# --- what is not in the state -------------------------------------------------------------------------------------


def save_and_restore(tmp_path: Path, state: dict[str, Any], step: Callable[[], None], **options: Any) -> list[str]:
    gc.collect()  # loaders of earlier tests
    url = f"file://{tmp_path}"
    with Checkpointer(state, url, policy="every 1000 steps", **options) as ckpt:
        step()
        ckpt.save(1).wait("durable", 30)
        step()
        ckpt.save(2).wait("durable", 30)
    with Checkpointer(state, url, policy="every 1000 steps", **options) as ckpt:
        assert ckpt.restore() == 2
        return list(ckpt.status().drift)


@pytest.mark.parametrize("forgotten", ["optimizer", "schedule", "scaler", None])
def test_what_trains_and_is_not_in_the_state_is_reported_at_the_first_save_and_by_the_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, forgotten: str | None
) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1) if forgotten != "optimizer" else None
    scaler = torch.amp.GradScaler("cpu")
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}

    def step() -> None:
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if schedule is not None:
            schedule.step()

    state = {name: part for name, part in parts.items() if name != forgotten and part is not None}
    with caplog.at_level(logging.WARNING):
        drift = save_and_restore(tmp_path, state, step)
    named = {
        "optimizer": "an optimizer (AdamW of 2 ",
        "schedule": "a learning rate scheduler",
        "scaler": "a GradScaler",
    }
    if forgotten is None:
        assert drift == []
        assert not caplog.records
        return
    assert len(drift) == 1, drift
    (reason,) = drift
    assert reason.startswith(named[forgotten])
    assert (
        sum(reason in record.message and "give it to the Checkpointer" in record.message for record in caplog.records)
        == 1
    )


def test_an_optimizer_without_a_state_or_of_another_model_is_not_missed(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    plain, elsewhere = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(other.parameters())

    def step() -> None:
        (model(torch.ones(2, 3)) + other(torch.ones(2, 3))).sum().backward()
        plain.step()
        elsewhere.step()

    assert save_and_restore(tmp_path, {"model": model}, step) == []


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # what torchdata calls
@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "shuffle"])
def test_an_order_that_a_stateful_loader_cannot_keep_is_reported(tmp_path: Path, kind: str) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    numbers = TensorDataset(torch.arange(24.0))
    random_sampler = RandomSampler(numbers)
    options: dict[str, Any] = {
        "sampler": {"sampler": random_sampler, "batch_size": 4},
        "batch sampler": {"batch_sampler": BatchSampler(random_sampler, 4, drop_last=False)},
        "shuffle": {"shuffle": True, "batch_size": 4},
    }[kind]

    def read(save_at: int) -> tuple[list[float], Checkpointer]:
        found: list[float] = []
        loader = torchdata.StatefulDataLoader(numbers, **options)
        with Checkpointer({"loader": loader}, f"file://{tmp_path}", policy="every 1000 steps") as ckpt:
            step = ckpt.restore() or 0
            for (batch,) in loader:
                found += batch.tolist()
                step += 1
                if step == save_at:
                    ckpt.save(step).wait("durable", 30)
        return found, ckpt

    undisturbed, _ = read(save_at=2)
    resumed, ckpt = read(save_at=-1)
    if kind == "shuffle":
        assert resumed == undisturbed[8:]
        assert ckpt.status().drift == ()
    else:
        assert resumed != undisturbed[8:]
        (drift,) = ckpt.status().drift
        assert drift.startswith("the order of 'loader' is drawn by torch's RandomSampler, which has no state")


def test_a_position_that_somebody_else_keeps_is_no_drift(tmp_path: Path) -> None:
    loader = DataLoader(torch.arange(8))
    model = {"model": torch.nn.Linear(2, 2)}
    (told,) = save_and_restore(tmp_path / "a", model, lambda: None)
    assert 'positions={"loader": "kept by ..."}' in told
    kept = {"loader": "kept by the Trainer, which skips batches"}
    assert save_and_restore(tmp_path / "b", model, lambda: None, positions=kept) == []
    assert len(loader) == 8
