"""Workers, memory nodes and link rates in, the time of checkpoints to the nodes and a fitted model out.

The machines are processes of this host, each in a network namespace of its own if this is root."""

from deepvm.calibrate.network.measure import NetworkCalibration, calibrate_network
from deepvm.calibrate.network.settings import NetworkSettings

__all__ = ["NetworkCalibration", "NetworkSettings", "calibrate_network"]
