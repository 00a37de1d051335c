"""Codec between actions of the protocol and protobuf messages.

A generation of 0, which no grant has, stands for an ask without a grant.
"""

from __future__ import annotations

from typing import cast

from diptych.worker.v1 import handoff_pb2, work_pb2
from kvtransfer.protocol.messages import (
    GrantRef,
    Key,
    SendAbort,
    SendAsk,
    SendCommit,
    SendDenied,
    SendGrant,
    SendPushed,
    SendStopped,
    SendWithdrawal,
)

Request = handoff_pb2.HandoffServiceLinkRequest
Response = handoff_pb2.HandoffServiceLinkResponse


def key_of(message: work_pb2.AttemptId) -> Key:
    """Return (request id, attempt)."""
    return (message.request_id, message.attempt)


def attempt_id(key: Key) -> work_pb2.AttemptId:
    """Return the message of a key; the inverse of `key_of`."""
    return work_pb2.AttemptId(request_id=key[0], attempt=key[1])


def ref_of(message: handoff_pb2.GrantId) -> GrantRef:
    """Return the name of a grant."""
    return GrantRef(key_of(message.id), message.slot, message.generation)


def grant_id(ref: GrantRef) -> handoff_pb2.GrantId:
    """Return the message of a grant's name; the inverse of `ref_of`."""
    return handoff_pb2.GrantId(id=attempt_id(ref.key), slot=ref.slot, generation=ref.generation)


def failure(reason: int, message: str) -> work_pb2.Failure:
    """Return a failure with a FailureReason of the wire."""
    return work_pb2.Failure(reason=cast("work_pb2.FailureReason", reason), message=message)


def response_of(action: SendGrant | SendDenied | SendAbort) -> Response:
    """Return the message of the decode worker for an action."""
    match action:
        case SendGrant(_, ref, block_ids, cached_tokens, pins):
            return Response(
                grant=handoff_pb2.Grant(
                    grant=grant_id(ref),
                    block_ids=block_ids,
                    cached_tokens=cached_tokens,
                    window_pins=pins,
                )
            )
        case SendDenied(_, key, reason, message):
            why = None if reason is None else failure(reason, message)
            return Response(denied=handoff_pb2.GrantDenied(id=attempt_id(key), failure=why))
        case SendAbort(_, ref):
            return Response(abort=handoff_pb2.Abort(grant=grant_id(ref)))


def request_of(action: SendAsk | SendWithdrawal | SendStopped | SendPushed | SendCommit) -> Request:
    """Return the message of the prefill worker for an action."""
    match action:
        case SendAsk(key):
            return Request(ask=handoff_pb2.GrantAsk(id=attempt_id(key)))
        case SendWithdrawal(key):
            nothing_granted = handoff_pb2.GrantId(id=attempt_id(key))
            return Request(stopped=handoff_pb2.Stopped(grant=nothing_granted))
        case SendStopped(ref, reason, message):
            why = None if reason is None else failure(reason, message)
            return Request(stopped=handoff_pb2.Stopped(grant=grant_id(ref), failure=why))
        case SendPushed(ref, first_block, num_blocks, digests):
            pushed = handoff_pb2.Pushed(
                grant=grant_id(ref), first_block=first_block, num_blocks=num_blocks, digests=digests
            )
            return Request(pushed=pushed)
        case SendCommit(ref, num_tokens, first_tokens, note):
            commit = handoff_pb2.Commit(
                grant=grant_id(ref),
                num_tokens=num_tokens,
                first_tokens=cast("tuple[work_pb2.SampledToken, ...]", first_tokens),
                times=cast("work_pb2.PhaseTimes | None", note),
            )
            return Request(commit=commit)
