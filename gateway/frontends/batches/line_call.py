"""Request of a batch's line: read, generated and answered as over HTTP, and tried until it is served."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import ClassVar, Final

import grpc

from diptych.runtime.errors import REJECTIONS, DiptychError, InvalidParameter
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.telemetry import Attributes
from diptych.v1 import inference_pb2 as pb
from gateway.access.access import Caller
from gateway.call import Calls
from gateway.frontends.batches.lines import BatchLine, answered
from gateway.frontends.openai.endpoints import Read
from gateway.frontends.openai.errors import error_object, status_of
from gateway.frontends.openai.generation import Generation
from gateway.frontends.openai.http_call import BodyCall

PRIORITY: Final = -1_000_000
"""Added to a line's own priority: requests of clients that wait come before."""
_INT32: Final = (-(2**31), 2**31 - 1)
_RETRY_S: Final = (0.5, 15.0)  # the shortest and the longest wait for room


class LineCall(BodyCall):
    """Try of a line."""

    counts: ClassVar[bool] = False  # no client waits for it: rejections and limits of calls are for those

    def __init__(self, batch_id: str, line: BatchLine, caller: Caller, now: float) -> None:
        super().__init__(
            "line of a batch",
            received_at=now,
            header_request_id=f"{batch_id}-{line.number}",
            caller=caller,
        )

    async def write(self, message: pb.GenerateResponse) -> None:
        raise RuntimeError("a message of a stream, and no stream was asked for")

    @property
    def span_attributes(self) -> Attributes:
        return {}

    def ended(self, metrics: GatewayMetrics, code: grpc.StatusCode, duration_s: float) -> Attributes:
        return {}


class LineRunner:
    """Runner of single lines. One object serves all batches.

    Args:
        readers: of bodies, by endpoint.
    """

    def __init__(self, calls: Calls, generation: Generation, readers: Mapping[str, Read]) -> None:
        self._calls = calls
        self._generation = generation
        self._readers = readers

    async def run(
        self, batch_id: str, line: BatchLine, caller: Caller, until: float
    ) -> tuple[bool, bytes] | None:
        """Return whether the line succeeded, and the line of its result.

        None: there was no room for it before `until`, in Unix seconds.
        """
        wait_s = _RETRY_S[0]
        while True:
            call = LineCall(batch_id, line, caller, self._calls.clock())
            try:
                return True, answered(line, 200, call.request_id, await self._body(call, line))
            except DiptychError as error:
                if error.code not in REJECTIONS:
                    told = json.dumps(error_object(error, call.names))
                    return False, answered(line, status_of(error.code), call.request_id, told)
                wait_s = min(max(error.retry_after_s or 0.0, wait_s * 1.5), _RETRY_S[1])
            if time.time() + wait_s > until:
                return None
            await asyncio.sleep(wait_s)

    async def _body(self, call: LineCall, line: BatchLine) -> str:
        with self._calls.account(call):
            asked, answer = self._readers[line.url](dict(line.body))
            if asked.stream:
                raise InvalidParameter("stream", "must be false: a batch has whole answers")
            for builder in asked.builders:
                least, most = _INT32
                builder.request.priority = min(max(builder.request.priority + PRIORITY, least), most)
            call.id_of = answer.id_of
            messages = await self._generation.run(call, asked)
            return "".join(await answer.whole(call.request_id, messages))
