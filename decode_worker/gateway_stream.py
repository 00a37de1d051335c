"""A gateway's stream into this worker, and the messages to write on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from diptych.engine.sampling import Sampled, TokenLogprob
from diptych.runtime.failpoints import reach
from diptych.runtime.send_queue import SendQueue
from diptych.worker.v1 import decode_pb2, work_pb2
from diptych.worker_process.logprob_codec import attach_timings, encode_logprob
from kvtransfer.drivers.codec import attempt_id
from kvtransfer.protocol.messages import Key

Response = decode_pb2.DecodeServiceLinkResponse

MESSAGE_BYTES = 1 << 20
"""Most bytes of queued steps that are merged. One step is smaller: 1024 tokens with 20 alternatives each."""
PIECE_TOKENS = 128
"""Tokens of a whole output in a message: with 20 alternatives each, 30 KB and 5 ms of the event loop."""


@dataclass(slots=True)
class WholeOutput:
    """An output that was not streamed, and its terminal message.

    It becomes messages while it is written, a piece at a time: all at once the outputs of a large search are
    more than a message may be, and seconds of the event loop.
    """

    token_ids: Sequence[int]
    scores: Sequence[TokenLogprob | None]
    ended: decode_pb2.DecodeEnded
    sent: int = 0

    @property
    def done(self) -> bool:
        return self.sent >= len(self.token_ids)

    def next_message(self) -> Response:
        """Return the next piece; the last one has the terminal message."""
        start, self.sent = self.sent, self.sent + PIECE_TOKENS
        step, ended = decode_pb2.StepBatch(), self.ended
        tokens = step.tokens.add(
            id=ended.id,
            index=start,
            token_ids=self.token_ids[start : self.sent],
            choice=ended.choice,
            scores=[encode_logprob(score) for score in self.scores[start : self.sent] if score is not None],
        )
        if start == 0:
            attach_timings(tokens, ended.times)
        if self.done:
            step.ended.append(ended)
        return Response(step=step)


class GatewayStream:
    """Collects the results of steps for one gateway; a slow stream gets fewer, larger messages."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.keys: dict[Key, None] = {}  # attempts that live and die with this stream, in order
        self._pending = 0  # whole outputs that are not written to their end
        self._step = decode_pb2.StepBatch()
        self._queue: SendQueue[Response | WholeOutput] = SendQueue()

    def token(
        self,
        wire_id: work_pb2.AttemptId,
        choice: int,
        index: int,
        sampled: Sampled,
        times: work_pb2.PhaseTimes | None = None,
    ) -> None:
        """Add a token to the batch of this step; `index` is its place in the choice's output.

        `times` goes with the first token of an attempt: the phases until then.
        """
        tokens = self._step.tokens.add(id=wire_id, index=index, token_ids=(sampled.token_id,), choice=choice)
        if sampled.score is not None:
            tokens.scores.append(encode_logprob(sampled.score))
        if times is not None:
            attach_timings(tokens, times)

    def output(
        self,
        key: Key,
        choice: int,
        token_ids: Sequence[int],
        scores: Sequence[TokenLogprob | None],
        reason: work_pb2.FinishReason,
        times: work_pb2.PhaseTimes,
    ) -> None:
        """Send a whole output, which was not streamed, and the reason of its end."""
        ended = _finished(key, choice, reason, times)
        self._queue.put(WholeOutput(token_ids, scores, ended))
        self._pending += 1
        reach("decode.finishing")

    def finished(
        self, key: Key, choice: int, reason: work_pb2.FinishReason, times: work_pb2.PhaseTimes
    ) -> None:
        self._step.ended.append(_finished(key, choice, reason, times))
        reach("decode.finishing")

    def preempted(self, key: Key, choice: int, times: work_pb2.PhaseTimes) -> None:
        preempted = decode_pb2.Preempted()
        self._step.ended.add(id=attempt_id(key), choice=choice, preempted=preempted, times=times)

    def failed(
        self, key: Key, choice: int, reason: int, message: str, times: work_pb2.PhaseTimes | None = None
    ) -> None:
        failure = work_pb2.Failure(reason=cast("work_pb2.FailureReason", reason), message=message)
        self._step.ended.add(id=attempt_id(key), choice=choice, failure=failure, times=times)

    def prompt_scores(self, key: Key, first_position: int, scores: Sequence[work_pb2.Score]) -> None:
        """Send the log-probabilities of the prompt's tokens from `first_position` on."""
        message = work_pb2.PromptScores(id=attempt_id(key), first_position=first_position, scores=scores)
        self._queue.put(Response(prompt_scores=message))

    @property
    def has_pending(self) -> bool:
        """True while a whole output is still being written."""
        return self._pending > 0

    def flush(self) -> None:
        """Queue the step's batch for the writer, unless it is empty."""
        if self._step.tokens or self._step.ended:
            self._queue.put(Response(step=self._step))
            self._step = decode_pb2.StepBatch()

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None:
        self._queue.put(Response(heartbeat=beat))

    def flushed(self, request_id: int, blocks: int) -> None:
        """Answer a FlushPrefixCache."""
        self._queue.put(Response(flushed=work_pb2.PrefixCacheFlushed(id=request_id, blocks=blocks)))

    def adapter_answer(self, answer: work_pb2.AdapterAnswer) -> None:
        """Answer a LoadAdapter or UnloadAdapter."""
        self._queue.put(Response(adapter_answer=answer))

    def close(self) -> None:
        self._queue.close()

    async def messages(self) -> AsyncIterator[Response]:
        """Yield the messages to write, queued steps merged; ends when the stream is closed.

        Other messages go between two pieces of a whole output.
        """
        while batch := await self._queue.take():
            outputs = [item for item in batch if isinstance(item, WholeOutput)]
            for message in _coalesced([item for item in batch if not isinstance(item, WholeOutput)]):
                yield message
            if outputs:
                yield outputs[0].next_message()
                for output in outputs:
                    if not output.done:
                        self._queue.put(output)
                    else:
                        self._pending -= 1
                await asyncio.sleep(0)  # a write that has room waits for nothing


def _finished(
    key: Key, choice: int, reason: work_pb2.FinishReason, times: work_pb2.PhaseTimes
) -> decode_pb2.DecodeEnded:
    return decode_pb2.DecodeEnded(id=attempt_id(key), choice=choice, finished=reason, times=times)


def _coalesced(batch: Sequence[Response]) -> Iterator[Response]:
    """Yield the steps of a batch in few messages, in order, and the latest of its heartbeats."""
    steps: list[Response] = []
    beat: Response | None = None
    for message in batch:
        match message.WhichOneof("message"):
            case "step":
                steps.append(message)
            case "heartbeat":
                beat = message
            case _:
                yield message
    yield from _merged(steps) if len(steps) > 1 else steps
    if beat is not None:
        yield beat


def _merged(steps: Sequence[Response]) -> Iterator[Response]:
    """Yield the steps merged into messages of at most `MESSAGE_BYTES`."""
    merged, size = steps[0], steps[0].ByteSize()
    for step in steps[1:]:
        more = step.ByteSize()
        if size + more <= MESSAGE_BYTES:
            merged.step.MergeFrom(step.step)
            size += more
        else:
            yield merged
            merged, size = step, more
    yield merged
