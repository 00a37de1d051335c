"""One gateway's stream into this worker, and what is to be written on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

from decode_worker.request import DecodeRequest
from diptych.worker.v1 import decode_pb2, work_pb2
from engine.sampling import Sampled, Score
from kvtransfer.messages import Key
from kvtransfer.wire import attempt_id
from runtime.failpoints import reach
from runtime.outbox import Outbox
from worker.scored_tokens import score_message

Response = decode_pb2.DecodeServiceLinkResponse


class GatewayStream:
    """Collects what the engine's step produced for one gateway; a slow stream gets fewer, larger batches."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.keys: dict[Key, None] = {}  # attempts that live and die with this stream, in order
        self._step = decode_pb2.StepBatch()
        self._outbox: Outbox[Response] = Outbox()

    def token(
        self,
        request: DecodeRequest,
        choice: int,
        index: int,
        sampled: Sampled,
        times: work_pb2.PhaseTimes | None = None,
    ) -> None:
        """Add a token to the batch of this step; `index` is its place in the choice's output.

        `times` goes with the first token of an attempt: the phases until then.
        """
        tokens = self._step.tokens.add(
            id=request.wire_id, index=index, token_ids=(sampled.token_id,), choice=choice
        )
        if sampled.score is not None:
            tokens.scores.append(score_message(sampled.score))
        if times is not None:
            tokens.cached_tokens = times.cached_tokens
            tokens.times.CopyFrom(times)

    def output(
        self,
        request: DecodeRequest,
        choice: int,
        token_ids: Sequence[int],
        scores: Sequence[Score | None],
        times: work_pb2.PhaseTimes,
    ) -> None:
        """Add a whole output, which nothing of went out before."""
        self._step.tokens.add(
            id=request.wire_id,
            token_ids=token_ids,
            choice=choice,
            scores=[score_message(score) for score in scores if score is not None],
            cached_tokens=times.cached_tokens,
            times=times,
        )

    def finished(
        self, key: Key, choice: int, reason: work_pb2.FinishReason, times: work_pb2.PhaseTimes
    ) -> None:
        self._step.ended.add(id=attempt_id(key), choice=choice, finished=reason, times=times)
        reach("decode.finishing")

    def preempted(self, key: Key, choice: int, times: work_pb2.PhaseTimes) -> None:
        preempted = decode_pb2.Preempted()
        self._step.ended.add(id=attempt_id(key), choice=choice, preempted=preempted, times=times)

    def failed(
        self, key: Key, choice: int, reason: int, message: str, times: work_pb2.PhaseTimes | None = None
    ) -> None:
        failure = work_pb2.Failure(reason=cast("work_pb2.FailureReason", reason), message=message)
        self._step.ended.add(id=attempt_id(key), choice=choice, failure=failure, times=times)

    def flush(self) -> None:
        """Hand the step's batch to the writer, if there is anything in it."""
        if self._step.tokens or self._step.ended:
            self._outbox.put(Response(step=self._step))
            self._step = decode_pb2.StepBatch()

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None:
        self._outbox.put(Response(heartbeat=beat))

    def flushed(self, request_id: int, blocks: int) -> None:
        """Answer a FlushPrefixCache."""
        self._outbox.put(Response(flushed=decode_pb2.PrefixCacheFlushed(id=request_id, blocks=blocks)))

    def close(self) -> None:
        self._outbox.close()

    async def messages(self) -> AsyncIterator[Response]:
        """What to write, steps that queued up merged into one; ends when the stream is closed."""
        while batch := await self._outbox.take():
            steps: list[Response] = []
            beat: Response | None = None
            for message in batch:
                match message.WhichOneof("message"):
                    case "step" if steps:
                        steps[0].step.MergeFrom(message.step)
                    case "step":
                        steps.append(message)
                    case "heartbeat":
                        beat = message  # the latest says it all
                    case _:
                        yield message
            for message in steps:
                yield message
            if beat is not None:
                yield beat
