"""Going on with a stream that broke, at the next server: what to ask, when, and how often.

A stream breaks when its gateway dies or is shut down, or when no worker is left to go on with it. Its first
message has a token for that. The same request with the token and the ids received so far continues at the
next token, at any gateway of the same service: what comes then joins what came before, nothing twice. What
a server has not begun to answer is asked again as it was. CANCELLED is such a break, too (see
`diptych.client.channel`): for a stream that its caller left nothing is asked here.

The server that is asked next may have no room: all streams of a dead one come to it at once. It says so with
RESOURCE_EXHAUSTED and when to come back, and is not asked before. Such refusals in a row are bounded by the
client's number of retries. Without a hint there is nothing to wait for: a message was too large.
"""

import time
from collections.abc import Callable

import grpc

from diptych.client.completion import Received
from diptych.client.failure import CallFailed
from diptych.v1 import inference_pb2 as pb

MAX_FRUITLESS = 8  # tries in a row that bring no token
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)


class Resumption:
    """Request over all its calls.

    Args:
        request: without its model, which is known once a server has said it.
        received: the output so far, which the reader of the stream keeps up.
        servers: how many there are to go to, by turns.
        retries: after so many refusals in a row.
        timeout_s: for all calls together.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        received: Received,
        *,
        servers: int,
        retries: int,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._original = request
        self._received = received
        self._servers = servers
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._calls = 0
        self._retries = retries
        self._fruitless = 0
        self._refusals = 0
        self._had = 0
        self._not_before = [0.0] * servers  # on the clock, as the servers' hints say
        self.server = 0  # which one is to be asked

    @property
    def timeout_s(self) -> float | None:
        """Return the seconds that are left."""
        return None if self._deadline is None else max(self._deadline - self._clock(), 0.0)

    def request(self, model: str) -> pb.GenerateRequest:
        """Return the request of the next call."""
        self._calls += 1
        ids = self._received.token_ids
        request = pb.GenerateRequest()
        request.CopyFrom(self._original)
        request.model = model
        if not self._received.resume_token:
            return request
        request.resume_token = self._received.resume_token
        request.received_token_ids.extend(ids)
        if request.request_id:  # the first one may still be alive where no server has noticed the break
            request.request_id = f"{request.request_id[:120]}.{self._calls}"
        return request

    def complete(self, failure: CallFailed) -> bool:
        """Return whether all was received, and only the status after it was lost with the server."""
        return self._received.finished and failure.code in _BROKEN

    def wait_s(self, failure: CallFailed) -> float:
        """Return the seconds to wait before the next call; raises ``failure`` if there is no use in one."""
        self._count(failure)
        if failure.code not in _BROKEN and not _refused(failure):
            raise failure
        if self._received.begun and not self._received.resume_token:
            raise failure
        if self._fruitless >= MAX_FRUITLESS or self._refusals > self._retries:
            raise failure
        now = self._clock()
        self._not_before[self.server] = now + (failure.retry_after_s or 0.0)
        self.server = (self.server + 1) % self._servers
        wait = max(self._not_before[self.server] - now, self._backoff_s())
        left = self.timeout_s
        if left is not None and wait >= left:
            raise failure
        return wait

    def _count(self, failure: CallFailed) -> None:
        have = len(self._received.token_ids)
        if have > self._had:
            self._fruitless = self._refusals = 0
        elif _refused(failure):
            self._refusals += 1
        else:
            self._fruitless += 1
        self._had = have

    def _backoff_s(self) -> float:
        """Return the seconds to wait: none until every server was asked."""
        if self._fruitless < self._servers:
            return 0.0
        return min(FIRST_WAIT_S * 2.0 ** (self._fruitless - self._servers), LONGEST_WAIT_S)


def _refused(failure: CallFailed) -> bool:
    """Return whether the server has no room now and says when to come back."""
    return failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failure.retry_after_s is not None
