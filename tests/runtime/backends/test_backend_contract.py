"""What holds for machines wherever they come from. A backend joins by a fixture of its own in ``BACKENDS``.

``local`` plays them, ``ec2`` is asked through boto3 at a moto server, and SkyPilot's server is played in memory. Where
one differs by its nature, ``Place`` says how and why, and the others keep to the line.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deepvm.errors import UsageError
from deepvm.runtime.backends.base import Backend, Change, NoCapacity
from deepvm.runtime.backends.local.backend import LocalBackend
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.run_spec import RunSpec
from tests.support.runtime import ec2_server
from tests.support.runtime.machines import changes, job, machine, marked
from tests.support.runtime.sky_stand_in import Sky
from tests.support.waiting import wait_until

MACHINES = (machine("memory/0", "on-demand"), machine("worker/0"), machine("worker/1"))
NAMES = [m.name for m in MACHINES]
CLUSTER = Cluster(machines=MACHINES, architecture="tiering", catalog="x", checkpoint_bytes=None, restore_s=None)


@dataclass(frozen=True, kw_only=True)
class Place:
    backend: Backend
    machines: tuple[Machine, ...]  # an on-demand one and two on spot, none of them up
    left: Callable[[], list[str]]  # what there is of the run now, in words
    lose: Callable[[str], None]  # take that machine away from outside, as its owner or its market would
    loss: str  # what a spot machine is called that was lost so
    meanwhile: Callable[[], None] = lambda: None  # what the cloud does by itself after a while
    sell_out: Callable[[bool], None] | None = None  # worker/1 is not to be had, or again; None: there are always some

    up_at_once: bool = True
    """A process is up when it is started. A cloud is only asked, and tells later: what is ended before that
    was never seen up, and only its end is told."""

    preempts: bool = True
    """SkyPilot has no call that takes a spot machine away as its market does, and none that gives notice."""

    replaces: bool = False
    """An EC2 fleet that maintains itself brings a lost spot machine back while nobody watches (docs/decisions/0010)."""


@contextmanager
def local(folder: Path, _: pytest.FixtureRequest) -> Iterator[Place]:
    given = job(folder)

    def command(of: Machine) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", of.name]

    def found(name: str) -> list[int]:
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in marked(given)}
        return [pid for pid, its in words.items() if its[-2:-1] == [name.encode()]]

    def lose(name: str) -> None:
        """What was started an instant ago may have no environment yet, by which it is found."""
        for pid in wait_until(lambda: found(name), f"a process of {name}"):
            with suppress(ProcessLookupError):  # it ended with the one before
                os.kill(pid, signal.SIGKILL)

    backend = LocalBackend(given, command=command)
    try:
        yield Place(
            backend=backend, machines=MACHINES, left=lambda: [f"process {pid}" for pid in marked(given)],
            lose=lose, loss="lost",
        )  # fmt: skip
    finally:
        backend.down(within_s=0)


def cloud_job(folder: Path) -> RunSpec:
    (folder / "train.py").touch()
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text("a-token")
    return replace(job(folder), script=str(folder / "train.py"))


@pytest.fixture(scope="module")
def relay() -> Iterator[ec2_server.Relay]:
    pytest.importorskip("boto3")
    with ec2_server.account() as found:
        yield found


@contextmanager
def ec2(folder: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    relay: ec2_server.Relay = request.getfixturevalue("relay")
    relay.tidy()
    from deepvm.runtime.backends.ec2 import backend as module
    from deepvm.runtime.backends.ec2.backend import Ec2Backend, Ec2Settings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TROUBLE_EVERY_S", 0.0)
        sold_out: list[bool] = []

        def sell_out(none: bool) -> None:
            sold_out[:] = [none]
            trouble = {"EventSubType": "launchSpecTemporarilyBlacklisted", "EventDescription": "sold out"}
            relay.history[:] = [{"EventInformation": trouble, "Timestamp": "2026-11-16T00:00:00Z"}] if none else []

        settings = Ec2Settings(
            image=ec2_server.IMAGE, endpoint_url=relay.url, release_s=5.0, region=ec2_server.REGION, zone="us-east-1c"
        )
        yield Place(
            backend=Ec2Backend(cloud_job(folder), CLUSTER, settings), machines=MACHINES, left=ec2_server.remains,
            lose=lambda name: ec2_server.preempt(ec2_server.machines_of(relay, "run-1")[name]["InstanceId"]),
            loss="preempted", meanwhile=lambda: None if True in sold_out else ec2_server.maintain_all(),
            sell_out=sell_out, up_at_once=False, replaces=True,
        )  # fmt: skip


@contextmanager
def skypilot(folder: Path, _: pytest.FixtureRequest) -> Iterator[Place]:
    from deepvm.runtime.backends.skypilot.backend import SkyPilotBackend, SkyPilotSettings

    sky = Sky(arrives=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sky", sky)
        settings = SkyPilotSettings(region="us-east-1", ask_every_s=1e-9, down_within_s=1.0)
        yield Place(
            backend=SkyPilotBackend(cloud_job(folder), CLUSTER, settings), machines=MACHINES,
            left=lambda: [f"cluster {name}" for name in sky.alive],
            lose=lambda name: sky.alive.pop(f"deepvm-run-1-{name.replace('/', '-')}") and None,
            loss="preempted",
            sell_out=lambda none: (sky.sold_out.add if none else sky.sold_out.discard)("deepvm-run-1-worker-1"),
            up_at_once=False, preempts=False,
        )  # fmt: skip


BACKENDS: dict[str, Callable[[Path, pytest.FixtureRequest], AbstractContextManager[Place]]] = {
    "local": local, "ec2": ec2, "skypilot": skypilot,
}  # fmt: skip


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with BACKENDS[request.param](tmp_path, request) as made:
        yield made
        made.backend.down(within_s=0)
        assert made.left() == []


def all_up(place: Place) -> None:
    place.backend.up(place.machines)
    assert [change.state for change in changes(place.backend, len(NAMES))] == ["up"] * len(NAMES)


def until_down(place: Place, names: list[str]) -> list[Change]:
    """All that is told until the last of them is down."""
    found: list[Change] = []

    def all_down() -> bool:
        found.extend(place.backend.poll())
        return {change.machine for change in found if change.state == "down"} >= set(names)

    wait_until(all_down, f"the end of {names}")
    return found


def test_machines_that_were_asked_for_come_up_once_with_an_address(place: Place) -> None:
    assert place.left() == []
    place.backend.up(place.machines)
    found = changes(place.backend, len(NAMES))
    assert sorted((change.machine, change.state) for change in found) == [(name, "up") for name in NAMES]
    assert all(change.address and change.at_s > 0 for change in found)
    assert place.backend.poll() == []
    assert place.left() != []


def test_some_of_a_cluster_can_be_asked_for_before_the_others(place: Place) -> None:
    place.backend.up(place.machines[:1])
    assert [change.machine for change in changes(place.backend, 1)] == NAMES[:1]
    place.backend.up(place.machines[1:])
    assert sorted(change.machine for change in changes(place.backend, 2)) == NAMES[1:]


def test_what_is_up_cannot_be_asked_for_again_and_nothing_else_is_begun(place: Place) -> None:
    place.backend.up(place.machines[:1])
    with pytest.raises(UsageError, match="memory/0"):
        place.backend.up(place.machines)
    assert [change.machine for change in changes(place.backend, 1)] == NAMES[:1]
    assert place.backend.poll() == []


def test_what_is_on_its_way_cannot_be_asked_for_again_either(place: Place) -> None:
    place.backend.up(place.machines[:2])
    with pytest.raises(UsageError, match="worker/0"):
        place.backend.up(place.machines[1:])
    assert sorted(change.machine for change in changes(place.backend, 2)) == NAMES[:2]
    assert place.backend.poll() == []


def test_the_same_machine_twice_in_one_breath_is_refused(place: Place) -> None:
    with pytest.raises(UsageError, match="memory/0"):
        place.backend.up([place.machines[0], place.machines[0]])
    assert place.backend.poll() == []
    assert place.left() == []


def test_all_that_is_up_goes_down_and_nothing_is_left(place: Place) -> None:
    all_up(place)
    place.backend.down()
    assert place.left() == []
    found = changes(place.backend, len(NAMES))
    assert sorted((change.machine, change.state, change.why) for change in found) == [
        (name, "down", "stopped") for name in NAMES
    ]


def test_going_down_twice_is_going_down(place: Place) -> None:
    place.backend.down()
    place.backend.up(place.machines)
    place.backend.down(NAMES[:1])
    place.backend.down(NAMES)
    place.backend.down()
    assert place.left() == []
    found = until_down(place, NAMES)
    assert place.backend.poll() == []
    for name in NAMES:
        states = [change.state for change in found if change.machine == name]
        assert states == ["up", "down"] if place.up_at_once else states[-1:] == ["down"] and states.count("down") == 1
    assert {change.why for change in found if change.state == "down"} == {"stopped"}


def test_what_goes_down_alone_leaves_the_others_and_stays_away(place: Place) -> None:
    all_up(place)
    place.backend.down(["worker/1"])
    (gone,) = changes(place.backend, 1)
    assert (gone.machine, gone.state, gone.why) == ("worker/1", "down", "stopped")
    place.meanwhile()
    assert place.backend.poll() == []


def test_what_went_down_can_come_up_again_and_its_end_is_reported_first(place: Place) -> None:
    place.backend.up(place.machines[:1])
    place.backend.down()
    place.backend.up(place.machines[:1])
    told = ["up", "down", "up"] if place.up_at_once else ["down", "up"]
    assert [change.state for change in changes(place.backend, len(told))] == told
    assert place.backend.poll() == []


def test_one_of_several_can_come_up_again_before_its_end_was_reported(place: Place) -> None:
    all_up(place)
    place.backend.down(["worker/0"])
    place.backend.up(place.machines[1:2])
    found = changes(place.backend, 2)
    assert [(change.machine, change.state) for change in found] == [("worker/0", "down"), ("worker/0", "up")]
    assert place.backend.poll() == []


def test_a_machine_that_nobody_asked_for_is_refused(place: Place) -> None:
    place.backend.up(place.machines[:1])
    with pytest.raises(UsageError, match="worker/9"):
        place.backend.down(["worker/9"])
    with pytest.raises(UsageError, match="worker/9"):
        place.backend.preempt("worker/9", notice_s=0)
    assert [change.state for change in changes(place.backend, 1)] == ["up"]


def test_what_is_preempted_is_down_and_can_be_replaced(place: Place) -> None:
    all_up(place)
    if not place.preempts:
        with pytest.raises(UsageError, match="worker/1 cannot be preempted"):
            place.backend.preempt("worker/1", notice_s=0)
        assert place.backend.poll() == []
        return
    place.backend.preempt("worker/1", notice_s=0)
    (gone,) = changes(place.backend, 1)
    assert (gone.machine, gone.state, gone.why) == ("worker/1", "down", "preempted")
    place.backend.up(place.machines[2:])
    place.meanwhile()
    assert [change.machine for change in changes(place.backend, 1)] == ["worker/1"]


def test_what_is_lost_is_reported_once_and_can_be_replaced(place: Place) -> None:
    all_up(place)
    place.lose("worker/1")
    (gone,) = changes(place.backend, 1)
    assert (gone.machine, gone.state, gone.why) == ("worker/1", "down", place.loss)
    place.meanwhile()
    if not place.replaces:
        assert place.backend.poll() == []
    place.backend.up(place.machines[2:])
    assert [(change.machine, change.state) for change in changes(place.backend, 1)] == [("worker/1", "up")]
    assert place.backend.poll() == []


def test_what_was_lost_and_is_then_given_up_is_not_reported_again(place: Place) -> None:
    all_up(place)
    place.lose("worker/1")
    changes(place.backend, 1)
    place.backend.down(["worker/1"])
    place.meanwhile()
    assert place.backend.poll() == []
    place.backend.down()
    assert sorted(change.machine for change in until_down(place, NAMES[:2])) == NAMES[:2]


def test_a_market_that_has_none_names_the_machine_and_keeps_the_others(place: Place) -> None:
    if place.sell_out is None:
        pytest.skip("this machine always has another process to play one")
    all_up(place)
    place.sell_out(True)
    place.lose("worker/1")
    raised: list[NoCapacity] = []

    def refused() -> bool:
        try:
            for change in place.backend.poll():
                assert (change.machine, change.state) == ("worker/1", "down")
                place.backend.up(place.machines[2:])
        except NoCapacity as error:
            raised.append(error)
        return bool(raised)

    wait_until(refused, "NoCapacity")
    assert raised[0].machine == place.machines[2]
    place.sell_out(False)
    place.backend.up(place.machines[2:])  # asked for again later
    place.meanwhile()
    assert [(change.machine, change.state) for change in changes(place.backend, 1)] == [("worker/1", "up")]
