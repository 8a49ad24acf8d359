"""Hazards of spot machines: observed capacity in; fitted models, laws of spells and synthetic capacity out."""

from deepvm.market.hazard.alternating import AlternatingSpells
from deepvm.market.hazard.hidden import HiddenBulk
from deepvm.market.hazard.hyperexponential import Hyperexponential
from deepvm.market.hazard.model import HazardModel, SpellPair
from deepvm.market.hazard.observed import Observed, Spells, observe, spells_of
from deepvm.market.hazard.poisson import IndependentMachines

__all__ = [
    "AlternatingSpells",
    "HazardModel",
    "HiddenBulk",
    "Hyperexponential",
    "IndependentMachines",
    "Observed",
    "SpellPair",
    "Spells",
    "observe",
    "spells_of",
]
