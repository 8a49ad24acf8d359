"""Where a gang trains: the plan's zones, then its failover list, and what a move costs and saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepvm.market.trace import region_of
from deepvm.policy.conduct import Conduct
from deepvm.policy.loss import AfterLoss
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.supervise.gang import Gang
from tests.support.runtime.machines import machine

A, B, C = "us-east-1a", "us-east-1b", "eu-west-1a"
WORKERS = tuple(replace(machine(f"worker/{i}"), region="us-east-1", zone=A, usd_per_hour=0.1) for i in range(2))
KEEPER = machine("memory/0", "on-demand")
BETTER_TYPE = replace(WORKERS[0], instance="g5.xlarge", usd_per_hour=0.3, on_demand_usd_per_hour=1.0)
CLUSTER = Cluster(
    machines=(*WORKERS, KEEPER), architecture="tiering", catalog="c", checkpoint_bytes=6_000_000_000, restore_s=36.0,
    conduct=Conduct(zones=(A, B)), plan={"request": {"budget_usd": 3.0}},
)  # fmt: skip


class Board:
    """Prices and capacities by type and zone, which a test changes."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, tuple[int, float]]] = {"g4dn.xlarge": {A: (2, 0.1), B: (2, 0.16), C: (2, 0.05)}}

    def zones(self, instance: str) -> tuple[str, ...]:
        return tuple(self.rows.get(instance, ()))

    def capacity(self, instance: str, zone: str) -> int:
        return self.rows[instance][zone][0]

    def quote(self, machine: Machine) -> Machine:
        usd = self.rows[machine.instance][machine.zone or A][1]
        return replace(machine, region=region_of(machine.zone or A), usd_per_hour=usd)

    def put(self, zone: str, count: int, usd: float, instance: str = "g4dn.xlarge") -> None:
        self.rows.setdefault(instance, {})[zone] = (count, usd)


def gang(board: Board, *, threshold: float | None = 0.3, after_loss: AfterLoss | None = None) -> Gang:
    return Gang(board, after_loss or AfterLoss(), threshold=threshold)


def place(cluster: Cluster) -> set[tuple[str, str | None, float]]:
    return {(machine.instance, machine.zone, machine.usd_per_hour) for machine in cluster.gang}


def test_a_gang_whose_zone_is_down_moves_as_a_whole_to_the_cheapest_zone_of_the_plan() -> None:
    board = Board()
    board.put(A, 1, 0.1)
    found = gang(board).instead_of(CLUSTER, WORKERS[1], "sold out")
    assert found is not None
    cluster, changes = found
    assert place(cluster) == {("g4dn.xlarge", B, 0.16)}, "eu-west-1a is cheaper, but not in the plan"
    assert cluster.machines[-1] == KEEPER
    assert [machine.name for machine in cluster.machines] == [machine.name for machine in CLUSTER.machines]
    assert "moves from us-east-1a" in changes[0]
    assert "sold out" in changes[0]
    assert any("36 s" in change for change in changes)
    assert any("6 GB" in change and "$0.12" in change for change in changes)


def test_without_a_conduct_a_gang_waits_in_its_zone() -> None:
    board = Board()
    board.put(A, 0, 0.1)
    assert gang(board).instead_of(replace(CLUSTER, conduct=None), WORKERS[0], "sold out") is None


def test_a_gang_that_may_shrink_stays_as_long_as_enough_are_left() -> None:
    board = Board()
    board.put(A, 1, 0.1)
    shrinks = gang(board, after_loss=AfterLoss(wait_s=0.0, least=1))
    assert shrinks.instead_of(CLUSTER, WORKERS[1], "sold out") is None
    board.put(A, 0, 0.1)
    assert shrinks.instead_of(CLUSTER, WORKERS[1], "sold out") is not None


def test_the_failover_list_comes_after_the_zones_in_its_order_and_within_the_budget() -> None:
    board = Board()
    board.put(A, 0, 0.1)
    board.put(B, 1, 0.1)
    board.put(A, 2, 0.3, "g5.xlarge")
    board.put(A, 2, 0.9, "p3.2xlarge")
    dear = replace(BETTER_TYPE, instance="p3.2xlarge", usd_per_hour=0.9, on_demand_usd_per_hour=3.0)
    listed = replace(CLUSTER, failover=(replace(KEEPER, instance="m6i.large"), dear, BETTER_TYPE))
    found = gang(board).instead_of(listed, WORKERS[0], "sold out")
    assert found is not None
    assert place(found[0]) == {("p3.2xlarge", A, 0.9)}
    poorer = replace(listed, plan={"request": {"budget_usd": 1.0}})
    found = gang(board).instead_of(poorer, WORKERS[0], "sold out")
    assert found is not None
    assert place(found[0]) == {("g5.xlarge", A, 0.3)}
    board.put(A, 0, 0.3, "g5.xlarge")
    assert gang(board).instead_of(poorer, WORKERS[0], "sold out") is None


def test_a_gang_moves_back_when_that_is_cheaper_by_more_than_the_threshold_and_says_what_it_saves() -> None:
    board = Board()
    there = replace(CLUSTER, machines=(*(replace(w, zone=B, usd_per_hour=0.16) for w in WORKERS), KEEPER))
    board.put(A, 0, 0.1)
    assert gang(board).better(there) is None, "it is cheaper, but not up"
    board.put(A, 2, 0.113)
    assert gang(board).better(there) is None, "29 % are not enough"
    assert gang(board, threshold=None).better(there) is None
    board.put(A, 2, 0.1)
    found = gang(board).better(there)
    assert found is not None
    assert place(found[0]) == {("g4dn.xlarge", A, 0.1)}
    assert "costs less by more than 30%" in found[1][0]
    assert found[1][-1].startswith("it saves $0.1200/h: the move is paid after 61.8 min")
    assert gang(board).better(CLUSTER) is None


def test_traffic_is_said_only_where_a_machine_keeps_checkpoints_in_another_zone() -> None:
    board = Board()
    for keepers, said in (((KEEPER,), True), ((), False)):
        there = replace(CLUSTER, machines=(*(replace(w, zone=B, usd_per_hour=0.16) for w in WORKERS), *keepers))
        found = gang(board).better(there)
        assert found is not None
        assert any("from another zone costs" in sentence for sentence in found[1]) is said


def test_a_gang_returns_to_the_plans_own_type_when_that_does_the_same_work_for_less() -> None:
    board = Board()
    board.put(A, 2, 0.3, "g5.xlarge")
    mover = gang(board)
    rated = {"instances": [{"instance": "g4dn.xlarge", "eflops": 400.0}, {"instance": "g5.xlarge", "eflops": 1000.0}]}
    planned = replace(CLUSTER, plan={**CLUSTER.plan, **rated}, failover=(BETTER_TYPE,))
    assert mover.begin(planned) == planned
    there = replace(planned, machines=(*(replace(BETTER_TYPE, name=w.name) for w in WORKERS), KEEPER))
    board.put(A, 2, 0.1)
    assert mover.better(there) is None, "$0.25 and $0.30 for 1000 eFLOPS differ by 17 %"
    board.put(A, 2, 0.08)
    found = mover.better(there)
    assert found is not None
    assert place(found[0]) == {("g4dn.xlarge", A, 0.08)}


def test_it_begins_where_the_placement_starts() -> None:
    board = Board()
    board.put(A, 0, 0.1)
    assert place(gang(board).begin(CLUSTER)) == {("g4dn.xlarge", B, 0.16)}
    board.put(B, 1, 0.1)
    assert gang(board).begin(CLUSTER) == CLUSTER, "it waits"


def test_a_region_stands_for_any_of_its_zones() -> None:
    board = Board()
    board.put(A, 0, 0.1)
    region = replace(CLUSTER, conduct=Conduct(zones=("us-east-1",)))
    found = gang(board).instead_of(region, WORKERS[0], "sold out")
    assert found is not None
    assert place(found[0]) == {("g4dn.xlarge", B, 0.16)}


def test_a_zone_dearer_than_on_demand_is_not_taken() -> None:
    board = Board()
    board.put(A, 0, 0.5)
    board.put(B, 2, 0.6)
    assert gang(board).instead_of(CLUSTER, WORKERS[0], "sold out") is None


def test_a_zone_above_the_plans_ceiling_is_not_taken() -> None:
    board = Board()
    board.put(A, 0, 0.1)
    planned = replace(CLUSTER, conduct=Conduct(zones=(A, B), ceiling=1.5))
    assert gang(board).instead_of(planned, WORKERS[0], "sold out") is None, "0.16 is over 1.5 times 0.1"
    assert gang(board).instead_of(CLUSTER, WORKERS[0], "sold out") is not None, "by default, 3 times"


@pytest.mark.parametrize("count", [0, 1])
def test_a_plan_without_a_gang_never_moves(count: int) -> None:
    on_demand = tuple(machine(f"worker/{i}", "on-demand") for i in range(count))
    cluster = replace(CLUSTER, machines=(*on_demand, KEEPER))
    assert gang(Board()).better(cluster) is None
    assert gang(Board()).begin(cluster) == cluster
