"""Measurements that several tests hold predictions against: times of training on 1 to 32 machines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of one epoch of ResNet-18 on CIFAR-10, by number of nodes; 128 images per step and machine."""

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]
    gbps: float

    gradient_bytes: float = 44.7e6  # 11.17 M parameters in FP32
    steps: float = 391  # of one machine: 50,000 images


NODES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
G3S_S = (245.59, 138.38, 98.94, 54.10, 38.11, 30.82, 26.14, 22.84, 19.31, 19.60)
G4DN_S = (61.16, 59.04, 43.99, 26.90, 19.96, 16.34, 14.15, 12.78, 11.14, 11.65)
G5_S = (31.01, 65.60, 50.19, 30.20, 22.54, 18.27, 15.11, 13.88, 11.29, 10.77)


# Sustained bandwidths; that of g3s.xlarge is not published, 10 is what was advertised.
MEASURED = {
    "g3s.xlarge": Measured(nodes=NODES, seconds=G3S_S, gbps=10),
    "g4dn.xlarge": Measured(nodes=NODES, seconds=G4DN_S, gbps=5),
    "g5.xlarge": Measured(nodes=NODES, seconds=G5_S, gbps=2.5),
}
