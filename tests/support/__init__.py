"""What tests share: waiting, nodes, processes, servers and clients. Scripts here run as processes of their own."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
