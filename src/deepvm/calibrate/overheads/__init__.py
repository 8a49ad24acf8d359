"""Sizes of a training state in, the seconds that saves and recoveries cost out, by runs that really lose a machine."""

from deepvm.calibrate.overheads.measure import OverheadCalibration, calibrate_overheads
from deepvm.calibrate.overheads.settings import OverheadSettings

__all__ = ["OverheadCalibration", "OverheadSettings", "calibrate_overheads"]
