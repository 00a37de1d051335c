"""Generation of what one body asks for: one answer, or those of several prompts at once."""

from __future__ import annotations

import asyncio
import secrets

from diptych.runtime.errors import REJECTIONS, DiptychError, InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.access.quota import BatchQuota, QuotaUsage
from gateway.call import Calls
from gateway.frontends.openai.http_call import BodyCall, PromptCall
from gateway.frontends.openai.request_builder import HttpGenerateRequest
from gateway.request.field_checks import request_id
from gateway.served_models.router import ModelRouter


class Generation:
    """Runner of parsed bodies. One object serves all requests."""

    def __init__(self, calls: Calls, router: ModelRouter) -> None:
        self._calls = calls
        self._router = router

    async def run(self, call: BodyCall, asked: HttpGenerateRequest) -> list[pb.GenerateResponse]:
        """Return whole answers, one for each prompt; of a stream nothing, since `call` writes it.

        Raises DiptychError.
        """
        return await (self._one(call, asked) if len(asked.builders) == 1 else self._several(call, asked))

    async def _one(self, call: BodyCall, asked: HttpGenerateRequest) -> list[pb.GenerateResponse]:
        """Generate one answer and return it; nothing is returned for a stream, as in `_several`."""
        builder = asked.builders[0]
        call.names = builder.names
        if asked.stream:
            await self._router.stream(builder.request, call, assigned=True)
            return []
        return [await self._router.collect(builder.request, call, assigned=True)]

    async def _several(self, call: BodyCall, asked: HttpGenerateRequest) -> list[pb.GenerateResponse]:
        """Generate for all prompts at once; the first that fails ends the others."""
        meter = await self._meter(call.caller.quota_usage, len(asked.builders))
        served = True
        try:
            return await self._parts(call, asked, meter)
        except DiptychError as error:
            served = error.code not in REJECTIONS or (call.stream is not None and call.stream.started)
            raise
        finally:
            meter.close(served=served)

    async def _parts(
        self, call: BodyCall, asked: HttpGenerateRequest, meter: BatchQuota
    ) -> list[pb.GenerateResponse]:
        call.set_request_id(request_id("", call.header_request_id, lambda: secrets.token_hex(16)))

        async def one(prompt: int) -> pb.GenerateResponse | None:
            builder = asked.builders[prompt]
            part = PromptCall(call, prompt, meter, self._calls.clock())
            try:
                with self._calls.account(part):
                    if asked.stream:
                        await self._router.stream(builder.request, part, assigned=True)
                        return None
                    return await self._router.collect(builder.request, part, assigned=True)
            except DiptychError:
                call.names = builder.names
                raise

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in range(len(asked.builders))]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [message for task in tasks if (message := task.result()) is not None]

    async def _meter(self, meter: QuotaUsage, prompts: int) -> BatchQuota:
        """Reserve the quota before the first of them costs anything.

        Raises InvalidParameter or QuotaExceeded.
        """
        most = meter.quota.most_together
        if most is not None and prompts > most:
            why = "each is a request, and this API key may begin no more at once"
            raise InvalidParameter("prompt", f"must be at most {most} prompts: {why}")
        await meter.prepare(prompts, 0)
        return BatchQuota(meter, prompts, self._calls.clock())
