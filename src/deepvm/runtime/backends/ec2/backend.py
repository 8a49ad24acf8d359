"""A run's machines on EC2: a fleet that maintains itself for spot machines, instant fleets for on-demand ones.

Everything has the tag ``deepvm:run``, by which any process finds it at the run's end. Tested against a moto server,
which has EC2's protocol, but starts, replaces and preempts no machine. None of this has run on EC2 itself yet; the user
data and the events about missing capacity follow its documentation.

Why these kinds of fleets: docs/decisions/0010-ec2-fleets-that-maintain-themselves.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

from deepvm.errors import DeepvmError, Infeasible, UnknownName, UsageError
from deepvm.runtime.backends.base import Change, NoCapacity
from deepvm.runtime.backends.ec2.calls import Call, Calls
from deepvm.runtime.backends.ec2.cleanup import release
from deepvm.runtime.backends.ec2.instances import Ec2Instance, instances_of, troubles, why_down
from deepvm.runtime.backends.ec2.launcher import Launcher
from deepvm.runtime.backends.ec2.placement import region_of
from deepvm.runtime.backends.ec2.requests import MACHINE_TAG, Ec2Group, group_of, groups_of
from deepvm.runtime.backends.ec2.settings import Ec2Settings, end_s
from deepvm.runtime.cluster import Cluster, Machine, hub_of
from deepvm.runtime.run_spec import RunSpec

APPEARS_S = 300.0  # EC2 describes a new machine some seconds after it returned its id
STRAY_S = 120.0  # after which a machine that the run does not need is ended: its fleet may be replacing another one
TROUBLE_EVERY_S = 15.0  # between two reads of a fleet's history, while machines are missing

__all__ = ["Ec2Backend", "Ec2Run", "Ec2Settings"]


class Ec2Run:
    """A run on EC2 that is known by its name alone: enough to end it."""

    def __init__(self, run: str, calls: Calls, *, release_s: float) -> None:
        self._run, self._calls, self._release_s = run, calls, release_s

    def calls(self) -> Sequence[Call]:
        """Return the calls that changed something, or would have in a dry run. Secrets are ``***``."""
        return tuple(self._calls.made)

    def instances(self) -> Sequence[Ec2Instance]:
        return instances_of(self._calls, self._run)

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        if names is not None:
            raise UsageError("without its plan, only a whole run on EC2 can be ended: leave the names out")
        release(self._calls, self._run, within_s=max(within_s, self._release_s))


class Ec2Backend(Ec2Run):
    """The Backend of ``--on ec2``.

    It differs from other backends in two ways. A fleet replaces lost spot machines by itself: ``up`` makes no call for
    them, and ``poll`` may report them as up without one. And ``poll`` raises NoCapacity, once for each reason that a
    fleet gives for missing machines; the fleet keeps trying.
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
        self._wanted: dict[str, Machine] = {}  # those that should be up
        self._machine_of: dict[str, str] = {}  # instance -> machine
        self._up: dict[str, str] = {}  # machine -> instance, as reported by poll
        self._lost: set[str] = set()  # wanted, reported as down or without capacity, and not up again
        self._ended: list[Change] = []  # of machines that were ended before they were up
        self._own: dict[str, str] = {}  # instance that this process ended -> why
        self._first_s: dict[str, float] = {}  # instance -> when it was first known
        self._leftovers_checked = False
        self._reported: set[tuple[str, str]] = set()  # fleets and their troubles
        self._trouble_checked_s = time.monotonic()
        self._since = datetime.now(timezone.utc)

    @staticmethod
    def find(run: str, region: str, *, settings: Ec2Settings) -> Ec2Run:
        """Return a run that another process started, without its plan."""
        calls = Calls(region=region, endpoint_url=settings.endpoint_url)
        return Ec2Run(run, calls, release_s=settings.release_s)

    def up(self, machines: Sequence[Machine]) -> None:
        wanted = self._wanted | {machine.name: machine for machine in machines}
        self._refuse(machines, wanted)
        moved = [  # replanned as another type
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
        instances = {instance.id: instance for instance in self.instances()}
        now = time.time()
        changes, self._ended = self._ended + self._losses(instances, now), []
        lost = {change.machine for change in changes}
        for instance in instances.values():
            if not instance.alive or instance.id in self._own:
                continue
            self._assign(instance, but=lost)
            name = self._machine_of.get(instance.id)
            if name is not None and instance.state == "running" and name not in self._up and name not in lost:
                self._up[name] = instance.id
                self._lost.discard(name)
                changes.append(Change(machine=name, state="up", at_s=now, address=instance.address))
        if not changes:
            self._check_trouble()
        return changes

    def preempt(self, name: str, *, notice_s: float) -> None:  # noqa: ARG002 - see below
        """Terminate a spot machine. Only EC2 itself can give notices: ``notice_s`` is ignored, and the machine gets the
        system's SIGTERM."""
        machine = self._wanted.get(name)
        if machine is None:
            raise UnknownName("machine of this run", name, self._wanted)
        if machine.market != "spot":
            raise UsageError(f"{name} is on-demand: only spot machines can be preempted")
        if name not in self._up:
            raise UsageError(f"{name} is not up: only a machine that is up can be preempted")
        self._terminate([self._up[name]], "preempted")

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        """End machines, or the whole run. EC2 stops machines within some minutes; with ``names`` nothing waits."""
        if names is None and not self._calls.made:
            return  # nothing was started here; Ec2Run.down ends machines of another process
        for name in names or ():
            if name not in {machine.name for machine in self._cluster.machines} | self._wanted.keys():
                raise UnknownName("machine of this run", name, self._wanted)
        leaving = [name for name in self._wanted if names is None or name in names]
        self._find(leaving)
        if names is None:
            self._own = dict.fromkeys(self._machine_of, "stopped") | self._own
            super().down(within_s=within_s)
            self._launcher.reset()
        ended = [self._wanted.pop(name) for name in leaving]
        if names is not None:
            for group in groups_of(ended, self._hub):
                self._resize(group, self._wanted)  # before the termination, or the fleet would replace them
            self._terminate(
                [i for i, name in self._machine_of.items() if name in leaving and i not in self._own], "stopped"
            )
        for name in leaving:
            if name not in self._machine_of.values() and name not in self._lost:
                self._ended.append(Change(machine=name, state="down", why="stopped", at_s=time.time()))
        self._lost -= set(leaving)

    def _refuse(self, machines: Sequence[Machine], wanted: dict[str, Machine]) -> None:
        names = [machine.name for machine in machines]
        for machine in machines:
            known = self._wanted.get(machine.name)
            coming = known is not None and machine.name not in self._lost and self._group(known) == self._group(machine)
            if names.count(machine.name) > 1 or coming or self._runs(machine.name):
                raise UsageError(f"{machine.name} is up or requested already: end it before it is requested again")
        if self._hub not in wanted:
            raise UsageError(f"{self._hub} must be requested first: it has the hub")
        if self._wanted and self._hub in names:
            raise DeepvmError(
                f"{self._hub} is lost, and the run's hub with it: "
                f"end the run with deepvm run --down {self._run}, and start another"
            )
        cap, hourly = self._settings.max_usd_per_hour, sum(machine.usd_per_hour for machine in wanted.values())
        if cap is not None and hourly > cap:
            raise Infeasible(
                f"these machines cost ${hourly:.4f}/h at the plan's prices, and the cap is ${cap:.4f}/h: "
                "raise max_usd_per_hour, or plan with a smaller --budget",
                cheapest_usd=hourly,
            )
        if not self._leftovers_checked and not self._calls.dry_run:
            if alive := [instance for instance in self.instances() if instance.alive]:
                raise UsageError(
                    f"run {self._run} has {len(alive)} machines in {self._calls.region} from before: "
                    f"end them with deepvm run --down {self._run}, or give this run another name"
                )
            self._leftovers_checked = True

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
            self._wanted = before
            raise

    def _resize(self, group: Ec2Group, wanted: Mapping[str, Machine]) -> None:
        """Give a maintained fleet its number of machines. ``wanted``: all machines within the cap."""
        if group.maintained:
            of_it = [machine for machine in self._wanted.values() if self._group(machine) == group]
            self._launcher.maintain(group, of_it, wanted)

    def _group(self, machine: Machine) -> Ec2Group:
        return group_of(machine, self._hub)

    def _losses(self, instances: dict[str, Ec2Instance], now: float) -> list[Change]:
        changes = []
        over = self._launcher.ends_at_s is not None and now >= self._launcher.ends_at_s
        for instance, name in list(self._machine_of.items()):
            found = instances.get(instance)
            if found is not None and found.alive:
                continue
            if found is None and name not in self._up and time.monotonic() < self._first_s[instance] + APPEARS_S:
                continue
            why = why_down(found, own=self._own.pop(instance, None), over=over)
            changes.append(Change(machine=name, state="down", why=why, at_s=now))
            del self._machine_of[instance]
            self._up.pop(name, None)
            if name not in self._wanted or why == "stopped":
                continue  # it was ended here, and may have been requested again since
            if self._wanted[name].market == "on-demand" and name != self._hub:
                del self._wanted[name]  # it is replaced only by a new request
            else:
                self._lost.add(name)
        return changes

    def _runs(self, name: str) -> bool:
        """True if it has an instance that was not ended here."""
        return any(found == name and instance not in self._own for instance, found in self._machine_of.items())

    def _find(self, names: Sequence[str]) -> None:
        """Find the instances that fleets started for these machines since the last poll."""
        if not self._calls.dry_run and not set(names) <= set(self._machine_of.values()):
            for instance in self.instances():
                if instance.alive:
                    self._assign(instance, but=set())

    def _assign(self, instance: Ec2Instance, *, but: set[str]) -> None:
        """Assign a new instance of a fleet to a machine of its group that has none. ``but``: machines whose loss is
        reported first."""
        if instance.id in self._machine_of:
            return
        first_s = self._first_s.setdefault(instance.id, time.monotonic())
        taken = {*self._machine_of.values(), *but}
        for machine in self._wanted.values():
            if self._group(machine).name == instance.group and machine.name not in taken:
                self._tag(instance.id, machine.name)
                return
        if time.monotonic() > first_s + STRAY_S:
            self._terminate([instance.id], "stopped")

    def _tag(self, instance: str, name: str) -> None:
        self._machine_of[instance] = name
        self._first_s.setdefault(instance, time.monotonic())
        tags = [{"Key": MACHINE_TAG, "Value": name}, {"Key": "Name", "Value": f"deepvm {self._run} {name}"}]
        self._calls.change("ec2", "create_tags", {"Resources": [instance], "Tags": tags})

    def _terminate(self, instances: Sequence[str], why: str) -> None:
        if instances:
            self._own |= dict.fromkeys(instances, why)
            self._calls.change("ec2", "terminate_instances", {"InstanceIds": list(instances)})

    def _check_trouble(self) -> None:
        """Raise NoCapacity if a fleet with missing machines reports a new reason."""
        missing = [m for m in self._wanted.values() if m.name not in self._machine_of.values() and m.market == "spot"]
        if not missing or time.monotonic() - self._trouble_checked_s < TROUBLE_EVERY_S:
            return
        self._trouble_checked_s = time.monotonic()
        for machine in missing:
            fleet = self._launcher.fleets.get(self._group(machine))
            for trouble in troubles(self._calls, fleet, self._since) if fleet is not None else ():
                if (str(fleet), trouble) not in self._reported:
                    self._reported.add((str(fleet), trouble))
                    self._lost.add(machine.name)
                    raise NoCapacity(machine, trouble)
