"""Retries of a call that a server refuses for now: as many as a client makes, but visible.

gRPC, which else repeats a client's calls, waits in silence, and a quota may ask for half a minute.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from grpc import StatusCode

from diptych.client.failure import CallFailed
from diptych.client.timeouts import time_left

Result = TypeVar("Result")

_PAUSES_S = (0.2, 0.4, 0.8)
"""Pause where the server asks for no other: for one that is being replaced."""


def call_with_retries(
    call: Callable[[float | None], Result], timeout_s: float | None, say: Callable[[str], None]
) -> Result:
    """Call until it succeeds. `call` gets the seconds that are left, and has delivered nothing when it fails.

    Raises CallFailed: the last one, or one after which there is no time to wait.
    """
    left = time_left(timeout_s)
    for pause_s in _PAUSES_S:
        try:
            return call(left())
        except CallFailed as failure:
            wait_s = _wait_s(failure, pause_s)
            remaining_s = left()
            if wait_s is None or (remaining_s is not None and wait_s >= remaining_s):
                raise
            if failure.retry_after_s is not None:
                say(f"{failure}; waiting {wait_s:.3g} s, as the server asked")
        time.sleep(wait_s)
    return call(left())


def _wait_s(failure: CallFailed, pause_s: float) -> float | None:
    """None: it would fail again. Without a hint what is exhausted is the size of a message."""
    match failure.code:
        case StatusCode.RESOURCE_EXHAUSTED:
            return failure.retry_after_s
        case StatusCode.UNAVAILABLE | StatusCode.CANCELLED:  # a server that stops says the latter of calls
            return pause_s if failure.retry_after_s is None else failure.retry_after_s
    return None
