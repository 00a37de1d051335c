"""Going on with a stream that broke, at the next server: what to ask, when, and how often.

A stream breaks when its gateway dies or is shut down, or when no worker is left to go on with it. Its first
message has a token for that. The same request with the token and the ids received so far continues at the
next token, at any gateway of the same service: what comes then joins what came before, nothing twice. What
a server has not begun to answer is asked again as it was. CANCELLED is such a break, too (see
`diptych.channel`): of a stream that its caller left nobody asks here.
"""

import time
from collections.abc import Callable

import grpc

from diptych.completion import Received
from diptych.failure import CallFailed
from diptych.v1 import inference_pb2 as pb

MAX_FRUITLESS = 8  # tries in a row that bring no token
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)


class Resumption:
    """One request over all its calls.

    Args:
        received: what came so far, which whoever reads the stream keeps up.
        servers: how many there are to go to, by turns.
        timeout_s: for all calls together.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        received: Received,
        *,
        servers: int,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._original = request
        self._received = received
        self._servers = servers
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._calls = 0
        self._fruitless = 0
        self._had = 0
        self.server = 0  # which one is to be asked

    @property
    def timeout_s(self) -> float | None:
        """What is left of the time."""
        return None if self._deadline is None else max(self._deadline - self._clock(), 0.0)

    def request(self) -> pb.GenerateRequest:
        """What to ask now."""
        self._calls += 1
        ids = self._received.token_ids
        if not self._received.resume_token:
            return self._original
        request = pb.GenerateRequest()
        request.CopyFrom(self._original)
        request.resume_token = self._received.resume_token
        request.received_token_ids.extend(ids)
        if request.request_id:  # the first one may still be alive where nobody has noticed the break
            request.request_id = f"{request.request_id[:120]}.{self._calls}"
        return request

    def complete(self, failure: CallFailed) -> bool:
        """Whether all was received, and only the status after it was lost with the server."""
        return self._received.finished and failure.code in _BROKEN

    def wait_s(self, failure: CallFailed) -> float:
        """Seconds to wait before the next call; raises ``failure`` if there is no use in one."""
        have = len(self._received.token_ids)
        self._fruitless = 0 if have > self._had else self._fruitless + 1
        self._had = have
        begun = self._received.begun
        if failure.code not in _BROKEN or (begun and not self._received.resume_token):
            raise failure
        if self._fruitless >= MAX_FRUITLESS:
            raise failure
        wait = 0.0
        if self._fruitless >= self._servers:
            wait = min(FIRST_WAIT_S * 2 ** (self._fruitless - self._servers), LONGEST_WAIT_S)
        wait = max(wait, failure.retry_after_s or 0.0) if self._fruitless >= self._servers else wait
        left = self.timeout_s
        if left is not None and wait >= left:
            raise failure
        self.server = (self.server + 1) % self._servers
        return wait
