"""How a handoff can fail for the prefill worker.

HandoffError
├── HandoffRefused   the two workers cannot work together (or not now)
│   └── PeerReplaced    another process has the address: the one that was meant is gone
├── GrantRefused     this attempt gets no blocks
│   └── AttemptOver     nobody wants them any more, and the decode worker has told the gateway why
└── PeerLost         the link broke; whatever was granted is void
"""

from __future__ import annotations

from typing import cast

from diptych.worker.v1 import work_pb2


class HandoffError(Exception):
    """`failure` is what the prefill worker may tell the gateway."""

    def __init__(self, reason: int, message: str) -> None:
        super().__init__(message)
        self.failure = work_pb2.Failure(reason=cast("work_pb2.FailureReason", reason), message=message)


class HandoffDenied(HandoffError):
    """No link to this decode worker: not reachable, restarted, draining or incompatible."""


class PeerReplaced(HandoffDenied):
    """Another decode process answers at this address."""

    def __init__(self) -> None:
        reason = work_pb2.FailureReason.FAILURE_REASON_PEER_LOST
        super().__init__(reason, "another decode process has this address now")


class GrantDeniedError(HandoffError):
    """The decode worker denied the ask."""


class AttemptOver(GrantDeniedError):
    """The attempt ended at the decode worker before its blocks were used.

    It was cancelled, preempted or late, and the gateway hears that from there: a second voice, which calls
    it a failed handoff, might arrive first and count against the request.
    """

    def __init__(self) -> None:
        reason = work_pb2.FailureReason.FAILURE_REASON_KV_TRANSFER_FAILED
        super().__init__(reason, "the attempt is over at the decode worker")


class PeerLost(HandoffError):
    """The link to the decode worker broke."""

    def __init__(self) -> None:
        reason = work_pb2.FailureReason.FAILURE_REASON_PEER_LOST
        super().__init__(reason, "the link to the decode worker broke")
