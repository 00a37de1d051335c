"""The time that a caller gives a call → the timeout that gRPC is given."""

import time
from collections.abc import Callable

# Servers are told of no longer one, and one that is far longer overflows in gRPC: it would be over at once.
LONGEST_S = 27_000 * 3600.0


def call_timeout(timeout_s: float | None) -> float | None:
    """Return the deadline in seconds; None, for no deadline, also where it would come after `LONGEST_S`.

    Raises ValueError for what is no length of time.
    """
    if timeout_s is None:
        return None
    if not timeout_s >= 0:  # not a number is neither
        raise ValueError(f"timeout_s must be a number of seconds from 0 on, not {timeout_s}")
    return timeout_s if timeout_s <= LONGEST_S else None


def time_left(timeout_s: float | None) -> Callable[[], float | None]:
    """Return a function of the seconds that are left of a time that begins now: two calls may share one
    deadline.

    Raises ValueError as `call_timeout`.
    """
    timeout_s = call_timeout(timeout_s)
    if timeout_s is None:
        return lambda: None
    end = time.monotonic() + timeout_s
    return lambda: max(end - time.monotonic(), 0.0)
