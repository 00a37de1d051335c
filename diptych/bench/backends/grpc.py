"""Diptych's own protocol, on the generated stub: one message a decode step and no layer in between."""

from __future__ import annotations

import time

import grpc

from diptych.bench.backends import Unreachable
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.request import BenchRequest, Reply, RequestFailed, ServerTimes
from diptych.client.completion import read_chunk
from diptych.client.credentials import Access
from diptych.client.failure import read_failure
from diptych.client.results import Timings
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc


class GrpcBackend:
    """A Diptych gateway at `address` (host:port), over one connection."""

    name = "diptych"

    def __init__(self, address: str, asking: Asking, access: Access | None = None) -> None:
        access = access or Access()
        self._address, self._asking = address, asking
        self._channel = access.aio_channel(address)
        self._metadata = access.metadata
        self._stub = rpc.InferenceServiceStub(self._channel)
        self._model = asking.model

    async def model(self) -> str:
        if self._model is None:
            try:
                listed = await self._stub.ListModels(
                    pb.ListModelsRequest(), timeout=10, metadata=self._metadata
                )
            except grpc.RpcError as error:
                raise Unreachable(f"{self._address}: {read_failure(error)}") from None
            if not listed.models:
                raise Unreachable(f"{self._address}: the server lists no model")
            self._model = listed.models[0].name
        return self._model

    async def send(self, request: BenchRequest) -> Reply:
        message = self._message(request, await self.model())
        call = self._stub.StreamGenerate(message, timeout=self._timeout, metadata=self._metadata)
        arrivals: list[float] = []
        texts: list[str] = []
        tokens = 0
        last: pb.GenerateResponse | None = None
        try:
            async for message in call:
                now = time.perf_counter()
                for output in message.outputs:
                    if output.token_ids:
                        arrivals.append(now)
                        tokens += len(output.token_ids)
                        if self._asking.on_output is not None:
                            self._asking.on_output(now)
                    texts.append(output.text)
                last = message
        except grpc.RpcError as error:
            failure = read_failure(error)
            raise RequestFailed(failure.reason or failure.code.name, failure.message) from None
        finally:
            call.cancel()  # an abandoned stream would go on; after its end this does nothing
        if last is None or not arrivals:
            raise RequestFailed("NO_OUTPUT", "the stream ended without a token")
        return _reply(request, last, tuple(arrivals), tokens, "".join(texts))

    async def close(self) -> None:
        await self._channel.close()

    @property
    def _timeout(self) -> float:
        return self._asking.timeout_s

    def _message(self, request: BenchRequest, model: str) -> pb.GenerateRequest:
        message = pb.GenerateRequest(
            model=model,
            sampling=pb.SamplingParams(temperature=self._asking.temperature),
            stopping=pb.StoppingCriteria(max_tokens=request.output_len, ignore_eos=self._asking.ignore_eos),
        )
        if isinstance(request.prompt, str):
            message.text = request.prompt
        else:
            message.token_ids.ids.extend(request.prompt)
        return message


def _reply(
    request: BenchRequest, last: pb.GenerateResponse, arrivals: tuple[float, ...], tokens: int, text: str
) -> Reply:
    end = read_chunk(last)
    return Reply(
        arrivals=arrivals,
        prompt_tokens=end.usage.prompt_tokens if end.usage else request.prompt_len or 0,
        output_tokens=tokens,
        cached_tokens=end.usage.cached_prompt_tokens if end.usage else 0,
        text=text,
        server=_server_times(end.timings) if end.timings else None,
    )


def _server_times(timings: Timings) -> ServerTimes:
    return ServerTimes(
        queue=timings.queue,
        prefill=timings.prefill,
        handoff=timings.time_to_first_token - timings.queue - timings.prefill,
        kv_transfer=timings.kv_transfer,
    )
