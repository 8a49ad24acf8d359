"""Measure one point of compute: a workload and a batch size in; a ComputePoint and its doubts out. Imports torch."""

from __future__ import annotations

import gc

from deepvm.calibrate.compute.devices import TrainingDevice, cores_here, precision_mode
from deepvm.calibrate.compute.power import PowerMeter
from deepvm.calibrate.compute.steady import doubts
from deepvm.calibrate.compute.stepping import Stepper, time_steps
from deepvm.calibrate.models.dry_run import Counts
from deepvm.calibrate.profile_file import identity
from deepvm.calibrate.workloads import NAMES, Workload, build
from deepvm.errors import UnknownName, UsageError
from deepvm.performance.job import Job
from deepvm.performance.measured import Machine
from deepvm.performance.profile import ComputePoint


class Measuring:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @staticmethod
    def of(name: str, job: Job | None, machine: Machine) -> Measuring | None:
        """Return how to measure it; None if the job itself has the measurement."""
        if name in NAMES:
            return Measuring(build(name))
        if job is None:
            raise UnknownName("built-in workload", name, NAMES)
        there = None if job.provenance is None else job.provenance.machine
        if job.step_s is None or there is None:
            raise UsageError(
                f"job {name} has no measured step, and no built-in workload is called so: "
                "measure it here with deepvm profile -- train.py"
            )
        if identity(there) != identity(machine):
            raise UsageError(
                f"job {name} was measured on another machine ({there.cpu}, {there.title}): "
                "measure it here with deepvm profile -- train.py"
            )
        return None

    def count(self, batch: int, precision: str) -> Counts:
        return self.workload.count_step(batch, precision)

    def measure(
        self,
        batch: int,
        device: TrainingDevice,
        counts: Counts,
        *,
        precision: str,
        repeats: int,
        limit_s: float,
        load: float | None,
    ) -> tuple[ComputePoint, tuple[str, ...]]:
        """Train until steps are steady, then time them."""
        with precision_mode(precision), PowerMeter(device.power_index) as meter:
            stepper = Stepper(self.workload, batch, device, precision=precision)
            timing = time_steps(stepper.step, repeats=repeats, limit_s=limit_s)
        del stepper
        gc.collect()
        point = ComputePoint(
            batch=batch,
            step_s=timing.step_s,
            flops_per_step=counts.flops,
            traffic_bytes_per_step=counts.traffic_bytes,
            operations_per_step=counts.operations,
            watts=meter.watts,
        )
        return point, doubts(
            f"compute with a batch of {batch}", timing.step_s, load=load, cores=cores_here(), settled=timing.settled
        )
