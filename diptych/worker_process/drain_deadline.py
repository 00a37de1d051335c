"""How long what runs may go on in a worker that leaves. Pure: times are seconds on any one clock."""

from __future__ import annotations

import math

FINISHING_SHARE = 0.5
"""Of the grace; afterwards there is as much time again for what is handed back to find another worker."""
HAND_BACK_S = 1.0
"""What was handed back may still be written by a step: so long it gets to end and say so."""


class DrainDeadline:
    """At `hand_back_at` what has not finished goes back to its gateways; from `over_at` on nothing is waited
    for.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self.hand_back_at = self.over_at = math.inf
        self.cut(seconds, now)

    def cut(self, seconds: float, now: float) -> None:
        """Somebody is less patient: so long from now on, or less. Said again later it changes nothing."""
        finishing_s = FINISHING_SHARE * seconds
        self.hand_back_at = min(self.hand_back_at, now + finishing_s)
        self.over_at = min(self.over_at, now + max(seconds, finishing_s + HAND_BACK_S))
