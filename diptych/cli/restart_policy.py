"""Restart policy: the delay after a process's death, and the silence after which one is killed.

A process that is stopped, deadlocked or stuck keeps its ports open and never ends by itself: its work goes
elsewhere, but its capacity is missing. Silence is counted in probes, so that a pause of this process is one
unanswered probe at most.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Delays that grow after each failure in a row up to a cap, and start anew after a long life.

    A worker that cannot start would otherwise load its model in a loop and take the CPU from the others.
    """

    first_s: float = 0.2
    factor: float = 2.0
    cap_s: float = 10.0
    stable_after_s: float = 30.0

    def failures(self, before: int, lived_s: float) -> int:
        """Return the failures in a row, `before` among them, once a process ended after `lived_s`."""
        return 1 if lived_s >= self.stable_after_s else before + 1

    def delay_s(self, failures: int) -> float:
        """Return the seconds to wait before the next start after `failures` (at least 1) in a row."""
        exponent = min(failures - 1, 32)  # the cap is reached long before; a float must not overflow
        return min(self.cap_s, self.first_s * self.factor**exponent)


@dataclass(frozen=True)
class LivenessProbe:
    """Period of the probes, and how many in a row may fail.

    The default is some forty seconds, with five for each answer: a starved machine makes every process slow.
    """

    every_s: float = 5.0
    max_failures: int = 4


async def wait_until_unresponsive(answers: Callable[[], Awaitable[bool]], probe: LivenessProbe) -> None:
    """Return when too many probes in a row had no answer.

    Args:
        answers: probes once; has a time limit of its own.
    """
    missed = 0
    while missed < probe.max_failures:
        await asyncio.sleep(probe.every_s)
        missed = 0 if await answers() else missed + 1
