"""A workload in, step times of this machine by batch size out: a profile with its eFLOPS."""

from deepvm.calibrate.compute.calibration import ComputeCalibration, ComputeSettings, calibrate_compute

__all__ = ["ComputeCalibration", "ComputeSettings", "calibrate_compute"]
