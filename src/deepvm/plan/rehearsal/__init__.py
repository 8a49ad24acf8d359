"""A plan replayed again: what a plan writes down of its replays in, the same figures out.

``plan.risk.decide`` writes a ``Replay`` into every recommendation; ``deepvm simulate plan.json`` reads it.
"""

from deepvm.plan.rehearsal.beside import beside
from deepvm.plan.rehearsal.planned import Planned, read_planned

__all__ = ["Planned", "beside", "read_planned"]
