"""Messages to clients, as protobuf: pieces of output, usage and timings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from google.protobuf.duration_pb2 import Duration

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from gateway.attempt.phase_times import PhaseTimes
from gateway.attempt.types import Cause, FinishReason, TokenLogprob
from gateway.cooperative_yield import Yielder
from gateway.output.logprobs import LogprobWriter
from gateway.output.output_stream import StopMatch
from gateway.session.request_driver import RequestDriver

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


Scored = Sequence[tuple[int, TokenLogprob]]


class Responses:
    """Maker of the messages of all requests.

    The first message of a request has ``request_id``, ``model``, its digest and ``prompt``. Each message has
    one `OutputDelta` per choice with new output, in order; the last one of a choice has its
    ``finish_reason``. The last message has ``usage`` and ``timings``. A unary answer is one message that is
    first and last.
    """

    def __init__(self, tokenizer: Tokenizer, model_digest: str) -> None:
        self._logprobs = LogprobWriter(tokenizer)
        self._model_digest = model_digest

    async def message(
        self, driver: RequestDriver, choices: Iterable[int], *, first: bool
    ) -> pb.GenerateResponse:
        """Return a message with the new output of ``choices``, which is removed from the driver."""
        return await self._build(driver, ((choice, choice) for choice in choices), first=first)

    async def best_message(self, driver: RequestDriver, kept: Sequence[int]) -> pb.GenerateResponse:
        """Return a message with all output of the choices in ``kept``, renumbered in this order."""
        return await self._build(driver, enumerate(kept), first=True)

    async def _build(
        self, driver: RequestDriver, numbered: Iterable[tuple[int, int]], *, first: bool
    ) -> pb.GenerateResponse:
        """Build a message; ``numbered``: (index in the message, choice)."""
        message = pb.GenerateResponse()
        # All output is taken at once: what comes while scores are written belongs to the next message.
        taken = [_add(message, driver, choice, index) for index, choice in numbered]
        if first:
            _add_head(message, driver)
            message.model_digest = self._model_digest
        request = driver.job.request
        if request.logprobs is not None or request.prompt_logprobs is not None:
            await self._add_logprobs(message, taken, driver, first=first)
        return message

    async def _add_logprobs(
        self,
        message: pb.GenerateResponse,
        taken: Iterable[tuple[pb.OutputDelta, Scored]],
        driver: RequestDriver,
        *,
        first: bool,
    ) -> None:
        request, yielder = driver.job.request, Yielder()
        for output, scored in taken:
            await self._logprobs.add(output, scored, yielder)
        if first and driver.prompt_logprobs is not None:
            scores = driver.prompt_logprobs.scores
            await self._logprobs.add_prompt(message.prompt, request.prompt_ids, scores, yielder)


def _add(
    message: pb.GenerateResponse, driver: RequestDriver, choice: int, index: int
) -> tuple[pb.OutputDelta, Scored]:
    """Add the new output of a choice; return it and its scores, which are not added."""
    stream = driver.outputs[choice]
    delta = stream.take()
    output = message.outputs.add(
        index=index, text=delta.text, token_ids=delta.token_ids, reasoning_content=delta.reasoning
    )
    for call in delta.tool_calls:
        output.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments_json)
    reason = driver.output_buffer.finished.get(choice)
    if reason is None:
        return output, delta.scores
    output.finish_reason = _FINISH[reason]
    if reason is FinishReason.STOP and stream.called:
        output.finish_reason = pb.FINISH_REASON_TOOL_CALLS
    if reason is FinishReason.STOP and stream.stop_match is not None:
        _set_stop(output, stream.stop_match)
    return output, delta.scores


def _add_head(message: pb.GenerateResponse, driver: RequestDriver) -> None:
    request = driver.job.request
    message.request_id = request.request_id
    message.model = request.model
    message.resume_token = driver.resume_token
    message.prompt.token_count = len(request.prompt_ids)
    message.prompt.cached_token_count = driver.cached_tokens or 0
    if request.echo:
        message.prompt.token_ids.extend(request.prompt_ids)


def add_usage(message: pb.GenerateResponse, driver: RequestDriver, received_at: float) -> None:
    """Add usage and timings to the last message. ``received_at``: arrival of the call (gateway's clock)."""
    message.usage.CopyFrom(_usage(driver))
    if driver.job.request.want_timings:
        message.timings.CopyFrom(timings(driver, received_at))


def _set_stop(output: pb.OutputDelta, match: StopMatch) -> None:
    if match.text is not None:
        output.stop_text = match.text
    elif match.token_id is not None:
        output.stop_token_id = match.token_id


def _usage(driver: RequestDriver) -> pb.Usage:
    """Return the usage: all outputs count, also those that ``best_of`` drops; of beams the delivered ones."""
    prompt, completion = driver.job.prompt_tokens, driver.billed
    drafted, accepted = driver.drafts
    return pb.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        cached_prompt_tokens=driver.cached_tokens or 0,
        reasoning_tokens=driver.reasoning_tokens,
        drafted_tokens=drafted,
        accepted_draft_tokens=accepted,
    )


def timings(driver: RequestDriver, received_at: float) -> pb.Timings:
    """Return the phases that the workers measured, summed over the attempts at the choice that took longest.

    Start and end are on the gateway's clock.
    """
    now = driver.clock()
    phases = driver.phases
    state = driver.state
    result = pb.Timings(
        queue=_duration(driver.admission_s + phases.prefill_queue + phases.grant_wait),
        prefill=_duration(phases.prefill),
        kv_transfer=_duration(phases.kv_send + phases.kv_receive),
        decode_queue=_duration(phases.decode_queue),
        decode=_duration(decode_s(driver, phases)),
        total=_duration(now - received_at),
        kv_bytes_transferred=phases.kv_bytes_transferred,
        preemptions=state.preemptions,
        retries=state.retries.total() - state.retries[Cause.PREEMPTED],
        local_prefill=phases.local_prefills > 0,
        tier_blocks=phases.tier_blocks,
        kv_load=_duration(phases.kv_load) if phases.tier_blocks else None,
        encode=_duration(phases.encode) if phases.encode else None,
    )
    result.received_time.FromNanoseconds(time.time_ns() - round((now - received_at) * 1e9))
    if driver.first_token_at is not None:
        result.time_to_first_token.CopyFrom(_duration(driver.first_token_at - received_at))
    return result


def decode_s(driver: RequestDriver, phases: PhaseTimes) -> float:
    """Return the decode time in seconds, from the worker.

    Where the gateway ended the stream, it is the time from the first to the last token received here.
    """
    if phases.decode or driver.first_token_at is None or driver.last_token_at is None:
        return phases.decode
    return driver.last_token_at - driver.first_token_at


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(max(seconds, 0.0) * 1e9))
    return duration
