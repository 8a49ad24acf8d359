"""What is simulated: the work of one gang of machines."""

from __future__ import annotations

from dataclasses import dataclass

from deepvm.errors import Infeasible
from deepvm.performance.checks import check_number
from deepvm.units import format_count


@dataclass(frozen=True, kw_only=True, slots=True)
class GangJob:
    """A job that ``machines`` machines do together in ``work_h`` hours of undisturbed training."""

    work_h: float
    machines: int
    checkpoint_bytes: int = 0
    deadline_h: float | None = None  # from the start
    usd_per_hour_of_waiting: float = 0.0  # what an hour until the end is worth

    def __post_init__(self) -> None:
        check_number("work_h", self.work_h, above=0)
        check_number("machines", self.machines, at_least=1)
        check_number("checkpoint_bytes", self.checkpoint_bytes, at_least=0)
        check_number("usd_per_hour_of_waiting", self.usd_per_hour_of_waiting, at_least=0)
        if self.deadline_h is not None:
            check_number("deadline_h", self.deadline_h, above=0)
            if self.deadline_h < self.work_h:
                on = format_count(self.machines, "machine")
                raise Infeasible(
                    f"nothing keeps the deadline of {self.deadline_h:g} h: the work alone takes {self.work_h:g} h on "
                    f"{on}, and the nearest deadline that can be kept is a little above that"
                )
