"""Errors that end a request which had begun."""

from typing import ClassVar

import grpc

from diptych.runtime.errors.base import DiptychError
from diptych.runtime.errors.capacity import Draining


class Interrupted(DiptychError):
    """The request broke off; the code tells whether output had gone out to the client. Raise a subclass."""

    explanation: ClassVar[str]

    def __init__(self, tokens_emitted: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(
            self.explanation, metadata={"tokens_emitted": str(tokens_emitted)}, retry_after_s=retry_after_s
        )
        self.code = grpc.StatusCode.ABORTED if tokens_emitted else grpc.StatusCode.UNAVAILABLE

    def before_output(self) -> DiptychError:
        """Return the same error for tokens that came to this process, of which none went to the client."""
        return type(self)(retry_after_s=self.retry_after_s)


class WorkerLost(Interrupted):
    reason = "WORKER_LOST"
    explanation = "a worker of this request went away"


class ShutDown(Interrupted):
    """The gateway ends, and the grace for what runs is over."""

    reason = "SHUTTING_DOWN"
    explanation = "the server shut down before the answer was complete"

    def before_output(self) -> DiptychError:
        return Draining()


class KvTransferFailed(Interrupted):
    reason = "KV_TRANSFER_FAILED"
    explanation = "the handoff of the prompt's KV blocks failed"


class AdapterNotLoaded(Interrupted):
    """No workers have the request's adapter, and none can load it; their log and the gateway's say why."""

    reason = "ADAPTER_NOT_LOADED"
    explanation = "the workers could not load the adapter of this request"


class SlowReader(DiptychError):
    """The client does not read its stream; ``limit`` is the bound that was exceeded."""

    code = grpc.StatusCode.ABORTED
    reason = "SLOW_READER"

    def __init__(self, limit: str) -> None:
        super().__init__("the output was not read in time", metadata={"limit": limit})
        self.limit = limit


class DeadlineExceeded(DiptychError):
    """`phase` is where the request was: admission, queue, prefill, kv_transfer, decode, …"""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"

    def __init__(self, phase: str) -> None:
        super().__init__(f"the deadline passed in phase {phase}", metadata={"phase": phase})


class Cancelled(DiptychError):
    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class Internal(DiptychError):
    """A bug or logits that are not finite. The text is fixed: what happened is in the server's log.

    ``why`` is for that log alone; it holds no text and no token of the request.
    """

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self, why: str = "") -> None:
        super().__init__("internal error; the server's log has the details under this request id")
        self.why = why
