"""A run's machines on EC2: a fleet that maintains itself for the spot workers, instant ones for what is on-demand.

Everything carries the tag ``deepvm:run``, and is found by it when the run ends, from any process. Tested against a
moto server: it speaks EC2's protocol, but it starts no machine, replaces none and takes none away. None of this has
run on EC2 itself yet; above all the user data and the events that tell of missing capacity are from its documentation.

Why fleets of these kinds: docs/decisions/0010-ec2-fleets-that-maintain-themselves.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

from deepvm.errors import DeepvmError, Infeasible, UnknownName, UsageError
from deepvm.runtime.backends.base import Change, NoCapacity
from deepvm.runtime.backends.ec2.calls import Call, Calls
from deepvm.runtime.backends.ec2.cleanup import release
from deepvm.runtime.backends.ec2.instances import Seen, instances_of, troubles, why_down
from deepvm.runtime.backends.ec2.launcher import Launcher
from deepvm.runtime.backends.ec2.placement import region_of
from deepvm.runtime.backends.ec2.requests import MACHINE_TAG, Ec2Group, group_of, groups_of, hub_of
from deepvm.runtime.backends.ec2.settings import Ec2Settings, check_run_name, end_s
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.run_spec import RunSpec

APPEARS_S = 300.0  # EC2 may tell of a new machine some seconds after it gave its name
STRAY_S = 120.0  # a machine that no place is free for is ended then: its fleet may be in the middle of a replacement
TROUBLE_EVERY_S = 15.0  # a fleet's history is looked into, while machines are missing

__all__ = ["Ec2Backend", "Ec2Run", "Ec2Settings"]


class Ec2Run:
    """What there is of a run on EC2, known by its name alone: enough to end it."""

    def __init__(self, run: str, calls: Calls, *, release_s: float) -> None:
        self._run, self._calls, self._release_s = check_run_name(run), calls, release_s

    def calls(self) -> Sequence[Call]:
        """Every call that changed something, or would have in a dry run. Secrets are ``***``."""
        return tuple(self._calls.made)

    def instances(self) -> Sequence[Seen]:
        return instances_of(self._calls, self._run)

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        if names is not None:
            raise UsageError("without its plan, a run on EC2 is ended as a whole: leave the names out")
        release(self._calls, self._run, within_s=max(within_s, self._release_s))


class Ec2Backend(Ec2Run):
    """The Backend of ``--on ec2``.

    Two ways in which it differs from machines that are all ours: a lost spot machine comes back by itself, so that
    ``up`` for it makes no call, and ``poll`` may tell it to be up without one; and it is ``poll`` that raises
    NoCapacity, once for each reason, where a fleet says why it cannot have all of its machines, and goes on trying.
    """

    def __init__(
        self,
        spec: RunSpec,
        cluster: Cluster,
        settings: Ec2Settings,
        *,
        dry_run: bool = False,
        show: Callable[[str], None] | None = None,
    ) -> None:
        calls = Calls(
            region=region_of(settings, cluster), endpoint_url=settings.endpoint_url, dry_run=dry_run, show=show
        )
        super().__init__(spec.run, calls, release_s=settings.release_s)
        self._settings, self._cluster = settings, cluster
        self._hub = hub_of(cluster).name
        self._launcher = Launcher(spec, cluster, settings, calls, self._hub, ends_at_s=end_s(settings, cluster))
        self._wanted: dict[str, Machine] = {}  # those that should be up, whether they are or not
        self._of: dict[str, str] = {}  # instance -> machine
        self._up: dict[str, str] = {}  # machine -> instance, as told by poll
        self._lost: set[str] = set()  # wanted, told to be down or not to be had, and not back yet
        self._ended: list[Change] = []  # of those that went down before they came to be
        self._own: dict[str, str] = {}  # instance -> what we did to it
        self._first_s: dict[str, float] = {}  # instance -> when we heard of it
        self._looked_before = False  # whether another process has machines of this run
        self._reported: set[tuple[str, str]] = set()  # fleets' troubles
        self._looked = time.monotonic()
        self._since = datetime.now(timezone.utc)

    @staticmethod
    def find(run: str, region: str, *, settings: Ec2Settings | None = None, dry_run: bool = False) -> Ec2Run:
        """A run that another process started, without its plan."""
        settings = settings or Ec2Settings()
        calls = Calls(region=region, endpoint_url=settings.endpoint_url, dry_run=dry_run)
        return Ec2Run(run, calls, release_s=settings.release_s)

    def up(self, machines: Sequence[Machine]) -> None:
        wanted = self._wanted | {machine.name: machine for machine in machines}
        self._refuse(machines, wanted)
        moved = [  # planned anew, as another type, say
            self._wanted.pop(machine.name)
            for machine in machines
            if machine.name in self._wanted and self._group(self._wanted[machine.name]) != self._group(machine)
        ]
        for group in groups_of(moved, self._hub):
            self._resize(group, wanted)
        self._lost -= {machine.name for machine in machines}
        for group, asked in groups_of(machines, self._hub).items():
            if group.maintained:
                self._start_maintained(group, asked, wanted)
            else:
                self._start_once(group, asked, wanted)

    def poll(self) -> Sequence[Change]:
        if self._calls.dry_run:
            return ()
        seen = {instance.id: instance for instance in self.instances()}
        now = time.time()
        changes, self._ended = self._ended + self._losses(seen, now), []
        lost = {change.machine for change in changes}
        for instance in seen.values():
            if not instance.alive or instance.id in self._own:
                continue
            self._name(instance, but=lost)
            name = self._of.get(instance.id)
            if name is not None and instance.state == "running" and name not in self._up and name not in lost:
                self._up[name] = instance.id
                self._lost.discard(name)
                changes.append(Change(machine=name, state="up", at_s=now, address=instance.address))
        if not changes:
            self._look_for_trouble()
        return changes

    def preempt(self, name: str, *, notice_s: float) -> None:  # noqa: ARG002 - see below
        """Terminate a spot machine, as its market would. EC2 gives its notices itself, and two minutes: an end on
        purpose comes without one, whatever ``notice_s`` says, and the system's SIGTERM is all that a machine gets."""
        machine = self._wanted.get(name)
        if machine is None:
            raise UnknownName("machine of this run", name, self._wanted)
        if machine.market != "spot":
            raise UsageError(f"{name} is on-demand: no market takes it away; spot machines can be preempted on purpose")
        if name not in self._up:
            raise UsageError(f"{name} is not up, so it cannot be preempted")
        self._terminate([self._up[name]], "preempted")

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        """EC2 asks machines to stop by itself and ends them after some minutes. With ``names``, it is only asked."""
        if names is None and not self._calls.made:
            return  # what another process may have under this name is its own: Ec2Run.down ends it
        for name in names or ():
            if name not in {machine.name for machine in self._cluster.machines} | self._wanted.keys():
                raise UnknownName("machine of this run", name, self._wanted)
        leaving = [name for name in self._wanted if names is None or name in names]
        self._find(leaving)
        if names is None:
            self._own = dict.fromkeys(self._of, "stopped") | self._own
            super().down(within_s=within_s)
            self._launcher.forget()
        gone = [self._wanted.pop(name) for name in leaving]
        if names is not None:
            for group in groups_of(gone, self._hub):
                self._resize(group, self._wanted)  # first, or the fleet would replace them
            self._terminate([i for i, name in self._of.items() if name in leaving and i not in self._own], "stopped")
        for name in leaving:
            if name not in self._of.values() and name not in self._lost:
                self._ended.append(Change(machine=name, state="down", why="stopped", at_s=time.time()))
        self._lost -= set(leaving)

    def _refuse(self, machines: Sequence[Machine], wanted: dict[str, Machine]) -> None:
        names = [machine.name for machine in machines]
        for machine in machines:
            known = self._wanted.get(machine.name)
            coming = known is not None and machine.name not in self._lost and self._group(known) == self._group(machine)
            if names.count(machine.name) > 1 or coming or self._runs(machine.name):
                raise UsageError(
                    f"{machine.name} is up already or on its way: it cannot be asked for again before it is down"
                )
        if self._hub not in wanted:
            raise UsageError(f"{self._hub} must come first: the other machines meet there")
        if self._wanted and self._hub in names:
            raise DeepvmError(
                f"{self._hub} is lost, and the other machines know no other place to meet: "
                f"end the run with deepvm run --down {self._run}, and start another"
            )
        cap, hourly = self._settings.max_usd_per_hour, sum(machine.usd_per_hour for machine in wanted.values())
        if cap is not None and hourly > cap:
            raise Infeasible(
                f"these machines cost ${hourly:.4f}/h at the plan's prices, and the cap is ${cap:.4f}/h: "
                "raise --max-usd-per-hour, or plan with a smaller --budget",
                cheapest_usd=hourly,
            )

        if not self._looked_before and not self._calls.dry_run:
            self._refuse_leftovers()
            self._looked_before = True

    def _refuse_leftovers(self) -> None:
        alive = [instance for instance in self.instances() if instance.alive]
        if alive:
            raise UsageError(
                f"run {self._run} has {len(alive)} machines in {self._calls.region} from before: "
                f"end them with deepvm run --down {self._run}, or give this run another name"
            )

    def _start_once(self, group: Ec2Group, asked: Sequence[Machine], wanted: Mapping[str, Machine]) -> None:
        ids, refusal = self._launcher.start(group, asked, wanted)
        for machine, instance in zip(asked, ids, strict=False):
            self._wanted[machine.name] = machine
            self._tag(instance, machine.name)
        if refusal is not None:
            raise refusal

    def _start_maintained(self, group: Ec2Group, asked: Sequence[Machine], wanted: Mapping[str, Machine]) -> None:
        before = dict(self._wanted)
        self._wanted |= {machine.name: machine for machine in asked}
        try:
            self._resize(group, wanted)
        except DeepvmError:
            self._wanted = before  # asked for in vain
            raise

    def _resize(self, group: Ec2Group, wanted: Mapping[str, Machine]) -> None:
        """As many machines as are wanted of that group. ``wanted``: all that the cap has to pay for."""
        if group.maintained:
            of_it = [machine for machine in self._wanted.values() if self._group(machine) == group]
            self._launcher.maintain(group, of_it, wanted)

    def _group(self, machine: Machine) -> Ec2Group:
        return group_of(machine, self._hub)

    def _losses(self, seen: dict[str, Seen], now: float) -> list[Change]:
        changes = []
        over = self._launcher.ends_at_s is not None and now >= self._launcher.ends_at_s
        for instance, name in list(self._of.items()):
            found = seen.get(instance)
            if found is not None and found.alive:
                continue
            if found is None and name not in self._up and time.monotonic() < self._first_s[instance] + APPEARS_S:
                continue
            why = why_down(found, own=self._own.pop(instance, None), over=over)
            changes.append(Change(machine=name, state="down", why=why, at_s=now))
            del self._of[instance]
            self._up.pop(name, None)
            if name not in self._wanted or why == "stopped":
                continue  # or it was asked for again since
            if self._wanted[name].market == "on-demand" and name != self._hub:
                del self._wanted[name]  # nobody replaces it until it is asked for again
            else:
                self._lost.add(name)
        return changes

    def _runs(self, name: str) -> bool:
        """Whether it is there, and was not ended from here."""
        return any(found == name and instance not in self._own for instance, found in self._of.items())

    def _find(self, names: Sequence[str]) -> None:
        """The instances that fleets started for these since the last look."""
        if not self._calls.dry_run and not set(names) <= set(self._of.values()):
            for instance in self.instances():
                if instance.alive:
                    self._name(instance, but=set())

    def _name(self, instance: Seen, *, but: set[str]) -> None:
        """A free place of its group for an instance that its fleet started; not one that was lost just now, whose
        loss is told first."""
        if instance.id in self._of:
            return
        first_s = self._first_s.setdefault(instance.id, time.monotonic())
        taken = {*self._of.values(), *but}
        for machine in self._wanted.values():
            if self._group(machine).name == instance.group and machine.name not in taken:
                self._tag(instance.id, machine.name)
                return
        if time.monotonic() > first_s + STRAY_S:
            self._terminate([instance.id], "stopped")

    def _tag(self, instance: str, name: str) -> None:
        self._of[instance] = name
        self._first_s.setdefault(instance, time.monotonic())
        tags = [{"Key": MACHINE_TAG, "Value": name}, {"Key": "Name", "Value": f"deepvm {self._run} {name}"}]
        self._calls.change("ec2", "create_tags", {"Resources": [instance], "Tags": tags})

    def _terminate(self, instances: Sequence[str], why: str) -> None:
        if instances:
            self._own |= dict.fromkeys(instances, why)
            self._calls.change("ec2", "terminate_instances", {"InstanceIds": list(instances)})

    def _look_for_trouble(self) -> None:
        missing = [m for m in self._wanted.values() if m.name not in self._of.values() and m.market == "spot"]
        if not missing or time.monotonic() - self._looked < TROUBLE_EVERY_S:
            return
        self._looked = time.monotonic()
        for machine in missing:
            fleet = self._launcher.fleet_of(self._group(machine))
            for trouble in troubles(self._calls, fleet, self._since) if fleet is not None else ():
                if (fleet, trouble) not in self._reported:
                    self._reported.add((str(fleet), trouble))
                    self._lost.add(machine.name)
                    raise NoCapacity(machine, trouble)
