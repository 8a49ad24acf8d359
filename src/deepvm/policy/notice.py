"""What to do with the seconds that are left when a machine's end is announced."""

from __future__ import annotations

from enum import Enum

MARGIN_S = 2.0  # notices come late and clouds are early by about that much


class EmergencyDecision(Enum):
    SAVE_NOW = "save now"
    FINISH_UNDER_WAY = "finish the save that is under way"
    RELY_ON_LAST = "rely on the last checkpoint"


def at_notice(
    *,
    seconds_left: float,
    state_bytes: int,
    bytes_per_s: float | None,
    under_way_bytes: int | None = None,
    steps_unsaved: int = 1,
    margin_s: float = MARGIN_S,
) -> EmergencyDecision:
    """The most that can be saved for sure in the time that is left.

    ``state_bytes`` are those that a new save would have to move (only the changed ones where saves are incremental),
    ``bytes_per_s`` is the measured rate until they are safe, ``under_way_bytes`` what a save that has begun has yet
    to move, and ``steps_unsaved`` counts the steps since the last whole checkpoint.
    """
    usable_s = seconds_left - margin_s
    under_way = under_way_bytes is not None
    if steps_unsaved <= 0 and not under_way:
        return EmergencyDecision.RELY_ON_LAST
    if bytes_per_s is None:  # never measured: trying costs nothing, since only what is whole is published
        return EmergencyDecision.FINISH_UNDER_WAY if under_way else EmergencyDecision.SAVE_NOW
    movable_bytes = usable_s * bytes_per_s
    rest_bytes = under_way_bytes or 0
    if steps_unsaved > 0 and rest_bytes + state_bytes <= movable_bytes:
        return EmergencyDecision.SAVE_NOW  # once the one under way is whole, which then is what we fall back to
    if under_way and rest_bytes <= movable_bytes:
        return EmergencyDecision.FINISH_UNDER_WAY
    return EmergencyDecision.RELY_ON_LAST
