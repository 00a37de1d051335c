"""What a client gets, as protobuf: pieces of output, usage, and where the time went."""

from __future__ import annotations

import time

from google.protobuf.duration_pb2 import Duration

from diptych.v1 import inference_pb2 as pb
from gateway.conversation import Conversation
from gateway.output import Delta, StopMatch
from gateway.phase_times import Phases
from gateway.session import State
from gateway.session_events import FinishReason

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


def response(
    conversation: Conversation, delta: Delta, reason: FinishReason | None, *, first: bool, received_at: float
) -> pb.GenerateResponse:
    """One message of the stream; with ``first`` and a ``reason`` it is the whole answer.

    Args:
        received_at: when the call came, on the conversation's clock.
    """
    message = pb.GenerateResponse()
    request = conversation.job.request
    output = message.outputs.add(text=delta.text, token_ids=delta.token_ids)
    if first:
        message.request_id = request.request_id
        message.model = request.model
        message.prompt.token_count = len(request.prompt_ids)
        message.prompt.cached_token_count = conversation.cached_tokens or 0
    if reason is None:
        return message
    output.finish_reason = _FINISH[reason]
    if reason is FinishReason.STOP and conversation.output.stop_match is not None:
        _set_stop(output, conversation.output.stop_match)
    message.usage.CopyFrom(_usage(conversation))
    if request.want_timings:
        message.timings.CopyFrom(timings(conversation, received_at))
    return message


def _set_stop(output: pb.OutputDelta, match: StopMatch) -> None:
    if match.text is not None:
        output.stop_text = match.text
    elif match.token_id is not None:
        output.stop_token_id = match.token_id


def _usage(conversation: Conversation) -> pb.Usage:
    prompt, completion = conversation.job.prompt_tokens, conversation.output.billed
    return pb.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        cached_prompt_tokens=conversation.cached_tokens or 0,
    )


def timings(conversation: Conversation, received_at: float) -> pb.Timings:
    """Phases as the workers measured them, summed over attempts; the ends by the gateway's clock."""
    now = conversation.clock()
    phases = conversation.phases
    history = conversation.session.history
    result = pb.Timings(
        queue=_duration(admission_s(conversation) + phases.prefill_queue + phases.grant_wait),
        prefill=_duration(phases.prefill),
        kv_transfer=_duration(phases.kv_send + phases.kv_receive),
        decode_queue=_duration(phases.decode_queue),
        decode=_duration(decode_s(conversation, phases)),
        total=_duration(now - received_at),
        kv_bytes_transferred=phases.kv_bytes_transferred,
        preemptions=history.preemptions,
        retries=max(conversation.session.attempt - 1 - history.preemptions, 0),
    )
    result.received_time.FromNanoseconds(time.time_ns() - round((now - received_at) * 1e9))
    if conversation.first_token_at is not None:
        result.time_to_first_token.CopyFrom(_duration(conversation.first_token_at - received_at))
    return result


def admission_s(conversation: Conversation) -> float:
    """Seconds that the request waited in the gateway's own queue."""
    transitions = conversation.session.transitions
    queued_at = transitions[0][1]
    left_at = transitions[1][1] if len(transitions) > 1 else conversation.clock()
    return left_at - queued_at


def decode_s(conversation: Conversation, phases: Phases) -> float:
    """The decode worker's figure; where the gateway ended the stream, first to last token as seen here."""
    if phases.decode or conversation.first_token_at is None or conversation.last_token_at is None:
        return phases.decode
    return conversation.last_token_at - conversation.first_token_at


def phase_of_end(conversation: Conversation) -> State:
    """Where the request was when it ended (or is now)."""
    states = [state for state, _ in conversation.session.transitions]
    return states[-2] if conversation.session.over else states[-1]


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(max(seconds, 0.0) * 1e9))
    return duration
