"""When a process that died is started again."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Waits longer after each failure in a row, never gives up, and forgets failures after a long life.

    A worker that cannot start would otherwise load its model in a loop and take the CPU from the others.
    """

    first_s: float = 0.2
    factor: float = 2.0
    cap_s: float = 10.0
    stable_after_s: float = 30.0

    def failures(self, before: int, lived_s: float) -> int:
        """Failures in a row, now that a process ended after `lived_s` with `before` failures behind it."""
        return 1 if lived_s >= self.stable_after_s else before + 1

    def delay_s(self, failures: int) -> float:
        """Seconds to wait before the next start after `failures` (at least 1) in a row."""
        exponent = min(failures - 1, 32)  # the cap is reached long before; a float must not overflow
        return min(self.cap_s, self.first_s * self.factor**exponent)
