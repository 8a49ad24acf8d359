"""A workload and worker counts in, step times of data-parallel training by workers and the best curve out."""

from deepvm.calibrate.scaling.calibration import ScalingCalibration, ScalingSettings, calibrate_scaling

__all__ = ["ScalingCalibration", "ScalingSettings", "calibrate_scaling"]
