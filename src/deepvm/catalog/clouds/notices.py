"""How long before its end a spot machine gets a notice: a cloud in, the seconds that its manual promises out.

Clouds promise the time, not the notice: an interruption may come without one, and traces do not say which did.
"""

from __future__ import annotations

_NOTICE_S = {
    "aws": 120.0,  # EC2 User Guide, spot instance interruption notices
    "gcp": 30.0,  # Compute Engine, preemption process of spot VMs
    "azure": 30.0,  # Scheduled Events, Preempt: at least half a minute
}


def notice_s(cloud: str) -> float:
    """Return 0 for a cloud that promises none, or is unknown."""
    return _NOTICE_S.get(cloud, 0.0)
