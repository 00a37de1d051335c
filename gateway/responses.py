"""What a client gets, as protobuf: pieces of output, usage, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from google.protobuf.duration_pb2 import Duration

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from gateway.attempt.phase_times import PhaseTimes
from gateway.attempt.types import Cause, FinishReason, TokenLogprob
from gateway.cooperative_yield import Yielder
from gateway.output.output_stream import StopMatch
from gateway.output.token_logprobs import TokenLogprobs
from gateway.session.request_driver import RequestDriver

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


Scored = Sequence[tuple[int, TokenLogprob]]


class Responses:
    """Makes the messages of all requests.

    What a door gets: the first message of a request has ``request_id``, ``model`` and ``prompt``; each has
    the choices with something new, in order, one `OutputDelta` each; a choice's last one has its
    ``finish_reason``; the last message has ``usage`` and ``timings``. A whole answer is one message that is
    first and last.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._logprobs = TokenLogprobs(tokenizer)

    async def message(
        self, conversation: RequestDriver, choices: Iterable[int], *, first: bool
    ) -> pb.GenerateResponse:
        """What is new of ``choices``, which is taken out of the conversation."""
        return await self._made(conversation, ((choice, choice) for choice in choices), first=first)

    async def best(self, conversation: RequestDriver, kept: Sequence[int]) -> pb.GenerateResponse:
        """The whole answer from some of the choices, numbered anew in this order."""
        return await self._made(conversation, enumerate(kept), first=True)

    async def _made(
        self, conversation: RequestDriver, numbered: Iterable[tuple[int, int]], *, first: bool
    ) -> pb.GenerateResponse:
        """``numbered``: (index in the message, choice)."""
        message, turns = pb.GenerateResponse(), Yielder()
        # All is taken at one moment. What comes while scores are written out belongs to the next message.
        taken = [_add(message, conversation, choice, index) for index, choice in numbered]
        if first:
            _add_head(message, conversation)
        for output, scored in taken:
            await self._logprobs.add(output, scored, turns)
        request = conversation.job.request
        if first and request.prompt_logprobs is not None:
            scores = conversation.prompt_logprobs.scores
            await self._logprobs.add_prompt(message.prompt, request.prompt_ids, scores, turns)
        return message


def _add(
    message: pb.GenerateResponse, conversation: RequestDriver, choice: int, index: int
) -> tuple[pb.OutputDelta, Scored]:
    """What is new of a choice, but for its scores, which are returned."""
    stream = conversation.outputs[choice]
    delta = stream.take()
    output = message.outputs.add(index=index, text=delta.text, token_ids=delta.token_ids)
    for call in delta.tool_calls:
        output.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments_json)
    reason = conversation.output_buffer.finished.get(choice)
    if reason is None:
        return output, delta.scores
    output.finish_reason = _FINISH[reason]
    if reason is FinishReason.STOP and stream.called:
        output.finish_reason = pb.FINISH_REASON_TOOL_CALLS
    if reason is FinishReason.STOP and stream.stop_match is not None:
        _set_stop(output, stream.stop_match)
    return output, delta.scores


def _add_head(message: pb.GenerateResponse, conversation: RequestDriver) -> None:
    request = conversation.job.request
    message.request_id = request.request_id
    message.model = request.model
    message.resume_token = conversation.resume_token
    message.prompt.token_count = len(request.prompt_ids)
    message.prompt.cached_token_count = conversation.cached_tokens or 0
    if request.echo:
        message.prompt.token_ids.extend(request.prompt_ids)


def add_account(message: pb.GenerateResponse, conversation: RequestDriver, received_at: float) -> None:
    """Usage and timings, for the last message. ``received_at``: when the call came (the gateway's clock)."""
    message.usage.CopyFrom(_usage(conversation))
    if conversation.job.request.want_timings:
        message.timings.CopyFrom(timings(conversation, received_at))


def _set_stop(output: pb.OutputDelta, match: StopMatch) -> None:
    if match.text is not None:
        output.stop_text = match.text
    elif match.token_id is not None:
        output.stop_token_id = match.token_id


def _usage(conversation: RequestDriver) -> pb.Usage:
    """Every output is billed, also those that ``best_of`` threw away; of beams those that were delivered."""
    prompt, completion = conversation.job.prompt_tokens, conversation.billed
    return pb.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        cached_prompt_tokens=conversation.cached_tokens or 0,
    )


def timings(conversation: RequestDriver, received_at: float) -> pb.Timings:
    """Phases as the workers measured them, summed over the attempts at the choice that took longest; the ends
    by the gateway's clock.
    """
    now = conversation.clock()
    phases = conversation.phases
    state = conversation.state
    result = pb.Timings(
        queue=_duration(conversation.admission_s + phases.prefill_queue + phases.grant_wait),
        prefill=_duration(phases.prefill),
        kv_transfer=_duration(phases.kv_send + phases.kv_receive),
        decode_queue=_duration(phases.decode_queue),
        decode=_duration(decode_s(conversation, phases)),
        total=_duration(now - received_at),
        kv_bytes_transferred=phases.kv_bytes_transferred,
        preemptions=state.preemptions,
        retries=state.retries.total() - state.retries[Cause.PREEMPTED],
    )
    result.received_time.FromNanoseconds(time.time_ns() - round((now - received_at) * 1e9))
    if conversation.first_token_at is not None:
        result.time_to_first_token.CopyFrom(_duration(conversation.first_token_at - received_at))
    return result


def decode_s(conversation: RequestDriver, phases: PhaseTimes) -> float:
    """The decode worker's figure; where the gateway ended the stream, first to last token as seen here."""
    if phases.decode or conversation.first_token_at is None or conversation.last_token_at is None:
        return phases.decode
    return conversation.last_token_at - conversation.first_token_at


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(max(seconds, 0.0) * 1e9))
    return duration
