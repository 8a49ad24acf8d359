"""Measured steps of some machines in, step times of others with an interval out. The planner rates machines with it."""

from deepvm.performance.roofline.fitting import fit_roofline
from deepvm.performance.roofline.model import Load, Peaks, Prediction, Roofline, RooflinePoint
from deepvm.performance.roofline.reference import (
    accelerator_peaks,
    predict_step_s,
    reference_points,
    reference_roofline,
)

__all__ = [
    "Load",
    "Peaks",
    "Prediction",
    "Roofline",
    "RooflinePoint",
    "accelerator_peaks",
    "fit_roofline",
    "predict_step_s",
    "reference_points",
    "reference_roofline",
]
