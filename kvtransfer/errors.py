"""How a hand-over can fail for the prefill worker.

HandoffError
├── HandoffRefused   the two workers cannot work together (or not now)
├── GrantRefused     this attempt gets no blocks
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


class HandoffRefused(HandoffError):
    """No link to this decode worker: not reachable, restarted, draining or incompatible."""


class GrantRefused(HandoffError):
    """The decode worker denied the ask, or took the blocks back before they were used."""


class PeerLost(HandoffError):
    """The link to the decode worker broke."""

    def __init__(self) -> None:
        reason = work_pb2.FailureReason.FAILURE_REASON_PEER_LOST
        super().__init__(reason, "the link to the decode worker broke")
