"""A recorded market, played: what it refuses, takes and charges. The backend below it is a real list of machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.errors import DeepvmError, UsageError
from deepvm.policy.conduct import Conduct
from deepvm.runtime.backends.base import Change, NoCapacity
from deepvm.runtime.backends.local.played_market import PlayedMarket, load_markets, split_rules
from deepvm.runtime.cluster import Machine, load_cluster
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.local_run import checked
from tests.support.runtime.machines import machine
from tests.support.runtime.whole_runs import write_plan

SPOT = [machine("worker/0"), machine("worker/1")]


class Shelf:
    """Machines that are up at once; it records what it was asked to do."""

    def __init__(self) -> None:
        self.machines: list[str] = []
        self.preempted: list[tuple[str, float]] = []
        self._changes: list[Change] = []

    def up(self, machines: Sequence[Machine]) -> None:
        self.machines += [machine.name for machine in machines]

    def poll(self) -> Sequence[Change]:
        changes, self._changes = self._changes, []
        return changes

    def preempt(self, name: str, *, notice_s: float) -> None:
        if name not in self.machines:
            raise UsageError(f"{name} is down already")
        self.preempted.append((name, notice_s))
        self.down([name])

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        for name in self.machines[:] if names is None else names:
            self.machines.remove(name)
            self._changes.append(Change(machine=name, state="down", why="preempted"))


def trace(folder: Path, zone: str, data: list[int], prices: list[float] | None = None) -> Path:
    path = folder / f"{zone}_T4_1.json"
    document = {"metadata": {"gap_seconds": 600}, "data": data} | ({"prices": prices} if prices else {})
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def played(rule: str, machines: Sequence[Machine] = SPOT) -> tuple[PlayedMarket, Shelf, list[float]]:
    """A market on a clock that the test sets."""
    now_s, shelf = [1000.0], Shelf()
    markets = load_markets(split_rules(rule)[0], machines)
    return PlayedMarket(shelf, markets, clock=lambda: now_s[0]), shelf, now_s


def test_a_market_refuses_takes_and_gives_again_as_its_trace_says(tmp_path: Path) -> None:
    market, shelf, now_s = played(
        f"market:{trace(tmp_path, 'us-east-1a', [2, 1, 0, 2])}:meaning=up:speed=600:notice=2s"
    )
    market.up(SPOT)
    assert not market.poll()
    now_s[0] += 1.0
    assert [change.machine for change in market.poll()] == ["worker/1"]
    assert shelf.preempted == [("worker/1", 2.0)]
    with pytest.raises(NoCapacity, match="us-east-1a has 1 machines for this run, and 1 of them run"):
        market.up([SPOT[1]])
    now_s[0] += 1.0
    assert [change.machine for change in market.poll()] == ["worker/0"]
    now_s[0] += 1.0
    market.up(SPOT)
    now_s[0] += 1e6
    assert not market.poll(), "its last tick lasts"
    assert shelf.machines == ["worker/0", "worker/1"]


def test_machines_before_the_refused_one_stay_requested(tmp_path: Path) -> None:
    market, shelf, _ = played(f"market:{trace(tmp_path, 'us-east-1a', [1])}:meaning=up")
    with pytest.raises(NoCapacity) as refused:
        market.up(SPOT)
    assert refused.value.machine.name == "worker/1"
    assert shelf.machines == ["worker/0"]


def test_on_demand_machines_are_not_the_markets(tmp_path: Path) -> None:
    market, shelf, _ = played(f"market:{trace(tmp_path, 'us-east-1a', [0])}:meaning=up")
    market.up([machine("memory/0", "on-demand")])
    assert shelf.machines == ["memory/0"]


def test_a_folder_is_a_market_of_zones_with_prices_of_the_moment(tmp_path: Path) -> None:
    trace(tmp_path, "us-east-1a", [2, 0], [0.1, 0.2])
    trace(tmp_path, "us-west-2b", [0, 2], [0.3, 0.4])
    market, _, now_s = played(f"market:{tmp_path}:meaning=up:speed=600")
    there = replace(SPOT[0], zone="us-west-2b")
    quoted = market.quote(SPOT[0])
    assert (quoted.zone, quoted.region, quoted.usd_per_hour) == ("us-east-1a", "us-east-1", 0.1)
    assert market.quote(there).usd_per_hour == 0.3
    now_s[0] += 1.5
    assert market.quote(there).usd_per_hour == 0.4
    assert [market.capacity("g4dn.xlarge", zone) for zone in market.zones("g4dn.xlarge")] == [0, 2]


def test_a_market_without_prices_charges_what_the_plan_says(tmp_path: Path) -> None:
    market, _, _ = played(f"market:{trace(tmp_path, 'us-east-1a', [2])}:meaning=up")
    assert market.quote(SPOT[0]).usd_per_hour == SPOT[0].usd_per_hour


def test_each_type_has_a_market_of_its_own_and_others_have_none(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    rules = (
        f"market:{trace(tmp_path / 'a', 'us-east-1a', [0])}:meaning=up,"
        f"market:{trace(tmp_path / 'b', 'us-east-1a', [2])}:meaning=up:instance=g5.xlarge"
    )
    market, shelf, _ = played(rules)
    with pytest.raises(NoCapacity, match="us-east-1a has 0"):
        market.up([SPOT[0]])
    market.up([replace(SPOT[0], instance="g5.xlarge")])
    assert shelf.machines == ["worker/0"]
    with pytest.raises(NoCapacity, match=r"the played market has g4dn\.xlarge, g5\.xlarge only"):
        market.up([replace(SPOT[1], instance="p3.2xlarge")])


def test_other_rules_stay_beside_a_market() -> None:
    rules, rest = split_rules("at:20s:worker/1, market:x:meaning=up , notice=5s")
    assert [rule.path for rule in rules] == [Path("x")]
    assert rest == "at:20s:worker/1,notice=5s"


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("market:x", "the meaning of the traces is not given"),
        ("market:x:meaning=down", "meaning"),
        ("market::meaning=up", "path is missing"),
        ("market:x:meaning=up:pace=2", "'pace' is unknown"),
        ("market:x:meaning=up:speed=fast", "speed is 'fast'"),
        ("market:x:meaning=up:speed=0", "speed is '0'"),
        ("market:x:meaning=up:speed=nan", "speed is 'nan'"),
        ("market:x:meaning=up:meaning=up", "there twice"),
        ("market:x:meaning=up:from=soon", "soon"),
    ],
)
def test_a_rule_that_is_not_valid_is_one_sentence(rule: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        split_rules(rule)
    assert says in str(refused.value)


def test_markets_that_cannot_be_played_are_refused_by_name(tmp_path: Path) -> None:
    path = trace(tmp_path, "us-east-1a", [2, 2])

    def refusal(rule: str, machines: Sequence[Machine] = SPOT) -> str:
        with pytest.raises(DeepvmError) as refused:
            load_markets(split_rules(rule)[0], machines)
        return str(refused.value)

    assert "behind its end" in refusal(f"market:{path}:meaning=up:from=1h")
    assert "two markets of g4dn.xlarge" in refusal(f"market:{path}:meaning=up,market:{path}:meaning=up")
    assert "on spot" in refusal(f"market:{path}:meaning=up", [machine("worker/0", "on-demand")])
    (tmp_path / "b").mkdir()
    trace(tmp_path / "b", "us-east-1a", [2])
    assert "has 2 markets" in refusal(f"market:{tmp_path}:meaning=up")
    assert "no-such" in refusal(f"market:{tmp_path}/no-such.json:meaning=up")


def test_a_plan_whose_zones_the_market_does_not_have_gets_a_note(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    rule = f"market:{trace(tmp_path, 'us-east-1a', [2])}:meaning=up"
    spec = RunSpec(script=str(script), preempt=rule)
    plan = load_cluster(write_plan(tmp_path))

    def notes(*zones: str) -> str:
        found, _, _ = checked(replace(plan, conduct=Conduct(zones=zones)), spec)
        return " ".join(found.notes)

    assert "the plan trains in eu-west-1a, and the played market has us-east-1a only" in notes("eu-west-1a")
    assert "played market" not in notes("us-east-1")
    assert "played market" not in notes()


def test_machines_that_are_not_the_markets_are_quoted_as_they_are(tmp_path: Path) -> None:
    market, _, _ = played(f"market:{trace(tmp_path, 'us-east-1a', [2], [0.1])}:meaning=up")
    for other in (machine("worker/0", "on-demand"), replace(SPOT[0], instance="p3.2xlarge")):
        assert market.quote(other) == other
    assert market.zones("p3.2xlarge") == ()
