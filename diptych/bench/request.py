"""Request of a benchmark and its outcome. Times are in seconds by `time.perf_counter`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

Prompt = tuple[int, ...] | str
"""Token ids, or text that is sent as it is."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Request that is to be sent.

    `arrival_s` is when a trace says that the request came, counted from the trace's first one.
    """

    prompt: Prompt
    output_len: int
    arrival_s: float | None = None

    @property
    def prompt_len(self) -> int | None:
        """Tokens of the prompt; None for text, whose length only the server knows."""
        return None if isinstance(self.prompt, str) else len(self.prompt)


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """A Diptych server's own account of one request, see Timings in the protocol.

    `handoff` is the server's time to first token less queueing and prefill: all between the end of the
    last chunk's computation and the first token's arrival at the gateway, plus the gateway's work before
    it dispatched the request. So it is an upper bound of what separating the two phases costs.
    """

    queue: float
    prefill: float
    handoff: float
    kv_transfer: float


@dataclass(frozen=True, slots=True)
class Reply:
    """A stream that ended well. `arrivals` are the times at which output came, one per message with output.

    `prompt_tokens` and `output_tokens` are the server's counts; where it gives none, the prompt's known
    length (or 0) and the number of messages.
    """

    arrivals: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    text: str
    server: ServerTimes | None = None


class RequestFailed(Exception):
    """A request without a whole answer. `code` groups failures: a gRPC status, "HTTP 429", "TIMEOUT"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a request as the generator saw it: `due` is when it should have been sent, `sent` when it
    was.
    """

    request: BenchRequest
    due: float
    sent: float
    ended: float
    reply: Reply | None
    error: RequestFailed | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first output. Raises ValueError for a request that failed."""
        return self._answer().arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending to the last output. Raises ValueError for a request that failed."""
        return self._answer().arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time of each token after the first; None for an answer of one token."""
        tokens = self._answer().output_tokens
        return (self.latency - self.ttft) / (tokens - 1) if tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Gaps between messages with output. Raises ValueError for a request that failed."""
        arrivals = self._answer().arrivals
        return [later - earlier for earlier, later in itertools.pairwise(arrivals)]

    def _answer(self) -> Reply:
        if self.reply is None:
            raise ValueError("a failed request has no latencies")
        return self.reply
