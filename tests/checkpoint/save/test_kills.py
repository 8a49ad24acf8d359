"""kill -9, at random points: the newest committed checkpoint restores, bit for bit, never half, never older."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.support.checkpoint.processes import Forked, Node, Truth, nodes, train, url_of
from tests.support.waiting import wait_until

OPTIONS = {"width": 740}


def points(seed: int, count: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.uniform(0.0, 0.3) for _ in range(count)]


def kill_trainers(log: Path, url: str, seed: int, count: int) -> None:
    """Each trainer first restores what the killed one before it left."""
    for session, pause_s in enumerate([*points(seed, count), 0.0]):
        trainer = Forked(train, url, str(log), session, OPTIONS)
        try:
            found = trainer.receive()
            truth = Truth.read(log)
            truth.check(found, truth.newest.get("remote", -1))
            time.sleep(pause_s)
        finally:
            trainer.kill()
    assert Truth.read(log).events.get("failed", 0) == 0


def kill_nodes(log: Path, url: str, node: Node, seed: int, count: int, *, with_trainer: bool) -> None:
    """The node comes back at its address with what it had spilled; the trainer saves again, or is killed, too."""
    chance, session = random.Random(seed), 0
    trainer = Forked(train, url, str(log), session, OPTIONS)
    try:
        trainer.receive()
        for pause_s in points(seed, count):
            time.sleep(pause_s + 0.05)
            if with_trainer and chance.random() < 0.5:
                trainer.kill()
            node.kill()
            promised = Truth.read(log).newest.get("durable", -1)
            time.sleep(chance.uniform(0.0, 0.1))
            node.start()
            if not with_trainer:
                remote = Truth.read(log).newest.get("remote", -1)
                wait_until(lambda seen=remote: Truth.read(log).newest.get("remote", -1) > seen, what="a save")
                promised = max(promised, 0)
            trainer.kill()
            session += 1
            trainer = Forked(train, url, str(log), session, OPTIONS)
            Truth.read(log).check(trainer.receive(), promised)
    finally:
        trainer.kill()


def kill_replicas(log: Path, url: str, started: list[Node], seed: int, count: int) -> None:
    """One node of two is lost for good and comes back empty: nothing is lost, and its copies are made again."""
    chance, session = random.Random(seed), 0
    trainer = Forked(train, url, str(log), session, OPTIONS)
    try:
        trainer.receive()
        for pause_s in points(seed, count):
            whole = Truth.read(log).whole
            wait_until(lambda seen=whole: Truth.read(log).whole > seen, what="a save on both nodes")
            time.sleep(pause_s)
            victim = chance.choice(started)
            victim.kill()
            if chance.random() < 0.5:
                time.sleep(chance.uniform(0.0, 0.3))  # saves go on, on one node
            trainer.kill()
            session += 1
            trainer = Forked(train, url, str(log), session, OPTIONS)
            truth = Truth.read(log)
            truth.check(trainer.receive(), truth.newest.get("remote", -1))
            victim.start()
    finally:
        trainer.kill()


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_trainer_loses_nothing_that_was_committed(tmp_path: Path, count: int) -> None:
    with nodes(count) as started:
        kill_trainers(tmp_path / "log", url_of(started), seed=count, count=2)


def test_a_killed_node_serves_again_what_it_had_spilled(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    with nodes(1, spill=tmp_path / "spill") as (node,):
        kill_nodes(tmp_path / "log", url_of([node]), node, seed=3, count=2, with_trainer=False)


def test_a_killed_replica_loses_nothing(tmp_path: Path) -> None:
    with nodes(2) as started:
        kill_replicas(tmp_path / "log", url_of(started, replicas=2), started, seed=4, count=2)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("count", [1, 2])
def test_trainers_killed_at_20_random_points(tmp_path: Path, count: int, seed: int) -> None:
    with nodes(count) as started:
        kill_trainers(tmp_path / "log", url_of(started), seed, 20)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(200, 204))
@pytest.mark.parametrize("with_trainer", [False, True])
def test_nodes_killed_at_12_random_points(tmp_path: Path, with_trainer: bool, seed: int) -> None:
    (tmp_path / "spill").mkdir()
    with nodes(1, spill=tmp_path / "spill") as (node,):
        kill_nodes(tmp_path / "log", url_of([node]), node, seed, 12, with_trainer=with_trainer)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(300, 304))
def test_replicas_killed_at_12_random_points(tmp_path: Path, seed: int) -> None:
    with nodes(2) as started:
        kill_replicas(tmp_path / "log", url_of(started, replicas=2), started, seed, 12)
