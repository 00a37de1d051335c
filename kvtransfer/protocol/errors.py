"""Errors of a handoff, as the prefill worker sees them.

HandoffError
├── HandoffDenied         the two workers cannot work together (or not now)
│   └── PeerReplaced      another process has the address; the one that was meant is gone
├── GrantDeniedError      this attempt gets no blocks
│   └── AttemptOver       the attempt ended at the decode worker, which reports it to the gateway
└── PeerLost              the link broke; every grant is void
"""

from __future__ import annotations

from typing import cast

from diptych.worker.v1 import work_pb2


class HandoffError(Exception):
    """Base of all errors of a handoff; `failure` is what the prefill worker may report to the gateway."""

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
    """The decode worker denied the ask for blocks."""


class AttemptOver(GrantDeniedError):
    """The attempt ended at the decode worker before its blocks were used.

    It was cancelled, preempted or late, and the gateway learns that from the decode worker. A second report,
    which calls it a failed handoff, might arrive first and count against the request.
    """

    def __init__(self) -> None:
        reason = work_pb2.FailureReason.FAILURE_REASON_KV_TRANSFER_FAILED
        super().__init__(reason, "the attempt is over at the decode worker")


class PeerLost(HandoffError):
    """The link to the decode worker broke."""

    def __init__(self) -> None:
        reason = work_pb2.FailureReason.FAILURE_REASON_PEER_LOST
        super().__init__(reason, "the link to the decode worker broke")
