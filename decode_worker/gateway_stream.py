"""One gateway's stream into this worker, and what is to be written on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

from diptych.worker.v1 import decode_pb2, work_pb2
from kvtransfer.messages import Key
from kvtransfer.wire import attempt_id, key_of
from runtime.outbox import Outbox


class GatewayStream:
    """Collects what the engine's step produced for one gateway; a slow stream gets fewer, larger batches."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.keys: set[Key] = set()  # attempts that live and die with this stream
        self._step = decode_pb2.StepBatch()
        self._outbox: Outbox[decode_pb2.DecodeServiceLinkResponse] = Outbox()

    def token(self, key: Key, index: int, token_id: int, times: work_pb2.PhaseTimes | None = None) -> None:
        """Add a token to the batch of this step; `index` is its place in the output.

        `times` goes with the first token of an attempt: the phases until then.
        """
        tokens = self._step.tokens.add(id=attempt_id(key), index=index, token_ids=[token_id])
        if times is not None:
            tokens.cached_tokens = times.cached_tokens
            tokens.times.CopyFrom(times)

    def finished(self, key: Key, reason: work_pb2.FinishReason, times: work_pb2.PhaseTimes) -> None:
        self._ended(decode_pb2.DecodeEnded(id=attempt_id(key), finished=reason, times=times))

    def preempted(self, key: Key, times: work_pb2.PhaseTimes) -> None:
        self._ended(decode_pb2.DecodeEnded(id=attempt_id(key), preempted=decode_pb2.Preempted(), times=times))

    def failed(self, key: Key, reason: int, message: str, times: work_pb2.PhaseTimes) -> None:
        failure = work_pb2.Failure(reason=cast("work_pb2.FailureReason", reason), message=message)
        self._ended(decode_pb2.DecodeEnded(id=attempt_id(key), failure=failure, times=times))

    def _ended(self, ended: decode_pb2.DecodeEnded) -> None:
        self._step.ended.append(ended)
        self.keys.discard(key_of(ended.id))

    def flush(self) -> None:
        """Hand the step's batch to the writer, if there is anything in it."""
        if self._step.tokens or self._step.ended:
            self._outbox.put(decode_pb2.DecodeServiceLinkResponse(step=self._step))
            self._step = decode_pb2.StepBatch()

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None:
        self._outbox.put(decode_pb2.DecodeServiceLinkResponse(heartbeat=beat))

    def close(self) -> None:
        self._outbox.close()

    async def messages(self) -> AsyncIterator[decode_pb2.DecodeServiceLinkResponse]:
        """What to write, steps that queued up merged into one; ends when the stream is closed."""
        while batch := await self._outbox.take():
            steps = [message.step for message in batch if message.WhichOneof("message") == "step"]
            if len(steps) > 1:
                merged = decode_pb2.StepBatch()
                for step in steps:
                    merged.MergeFrom(step)
                steps = [merged]
            for step in steps:
                yield decode_pb2.DecodeServiceLinkResponse(step=step)
            if beats := [message for message in batch if message.WhichOneof("message") == "heartbeat"]:
                yield beats[-1]
