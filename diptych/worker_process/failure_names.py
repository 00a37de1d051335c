"""Why attempts fail, in the words of spans and metrics."""

from __future__ import annotations

from typing import Final, cast

from diptych.worker.v1 import work_pb2

OF_THE_HAND_OVER: Final = frozenset(
    {
        work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED,
        work_pb2.FAILURE_REASON_PEER_LOST,
        work_pb2.FAILURE_REASON_INCOMPATIBLE,
    }
)
"""The other reasons are the request's own, or the worker's: it is late, too large, or the worker leaves."""


def failure_name(reason: int) -> str:
    """`KV_TRANSFER_FAILED`, of few values; a failure's message may name an address."""
    name = work_pb2.FailureReason.Name(cast("work_pb2.FailureReason", reason))
    return name.removeprefix("FAILURE_REASON_")
