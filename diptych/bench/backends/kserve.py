"""The Open Inference Protocol as KServe and Triton speak it: `ModelStreamInfer`, one request a stream.

On the generated stub. Token ids go in and come out as raw tensors, as tritonclient sends them.
"""

from __future__ import annotations

import struct
import time

import grpc

from diptych.bench.backends import Unreachable
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.request import BenchRequest, Reply, RequestFailed
from diptych.client.credentials import Access
from diptych.client.failure import read_failure
from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.kserve.v2 import open_inference_pb2_grpc as rpc
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as diptych_rpc


class KServeBackend:
    """A Diptych gateway at `address` (host:port), over one connection."""

    name = "kserve"

    def __init__(self, address: str, asking: Asking, access: Access | None = None) -> None:
        access = access or Access()
        self._address, self._asking = address, asking
        self._channel = access.aio_channel(address)
        self._metadata = access.metadata
        self._stub = rpc.GRPCInferenceServiceStub(self._channel)
        self._model = asking.model

    async def model(self) -> str:
        """Return the model's name. The protocol lists none: without --model, Diptych's own protocol does."""
        if self._model is None:
            listing = diptych_rpc.InferenceServiceStub(self._channel)
            try:
                listed = await listing.ListModels(pb.ListModelsRequest(), timeout=10, metadata=self._metadata)
            except grpc.RpcError as error:
                raise Unreachable(f"{self._address}: {read_failure(error)}; give --model") from None
            if not listed.models:
                raise Unreachable(f"{self._address}: the server lists no model")
            self._model = listed.models[0].name
        return self._model

    async def send(self, request: BenchRequest) -> Reply:
        message = self._message(request, await self.model())
        call = self._stub.ModelStreamInfer(
            iter([message]), timeout=self._asking.timeout_s, metadata=self._metadata
        )
        answer = _Answer(self._asking)
        try:
            async for response in call:
                answer.add(response, time.perf_counter())
        except grpc.RpcError as error:
            failure = read_failure(error)
            raise RequestFailed(failure.reason or failure.code.name, failure.message) from None
        finally:
            call.cancel()  # an abandoned stream would go on; after its end this does nothing
        return answer.reply()

    async def close(self) -> None:
        await self._channel.close()

    def _message(self, request: BenchRequest, model: str) -> oip.ModelInferRequest:
        message = oip.ModelInferRequest(model_name=model)
        if isinstance(request.prompt, str):
            text = request.prompt.encode()
            message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            message.raw_input_contents.append(struct.pack("<I", len(text)) + text)
        else:
            count = len(request.prompt)
            message.inputs.add(name="token_ids", datatype="INT32", shape=[count])
            message.raw_input_contents.append(struct.pack(f"<{count}i", *request.prompt))
        message.parameters["max_tokens"].int64_param = request.output_len
        message.parameters["temperature"].double_param = self._asking.temperature
        message.parameters["ignore_eos"].bool_param = self._asking.ignore_eos
        return message


class _Answer:
    """Answer that a stream brings, message by message."""

    def __init__(self, asking: Asking) -> None:
        self._on_output = asking.on_output
        self._arrivals: list[float] = []
        self._texts: list[bytes] = []
        self._tokens = 0
        self._last: oip.ModelInferResponse | None = None

    def add(self, message: oip.ModelStreamInferResponse, now: float) -> None:
        """Add a message. Raises RequestFailed for an error that the server sends in its stream."""
        if message.error_message:
            reason, _, told = message.error_message.partition(": ")
            raise RequestFailed(reason.rpartition(" ")[2] or "STREAM_ERROR", told)
        self._last = message.infer_response
        tensors = zip(self._last.outputs, self._last.raw_output_contents, strict=True)
        for tensor, data in tensors:
            if tensor.name == "text_output":
                self._texts.append(data[4:])
            elif tensor.name == "token_ids" and tensor.shape[0]:
                self._tokens += tensor.shape[0]
                self._arrivals.append(now)
                if self._on_output is not None:
                    self._on_output(now)

    def reply(self) -> Reply:
        """Return the reply. Raises RequestFailed for a stream without output or without an end."""
        last = self._last
        if last is None or not self._arrivals:
            raise RequestFailed("NO_OUTPUT", "the stream ended without a token")
        if not last.parameters["triton_final_response"].bool_param:
            raise RequestFailed("BROKEN_STREAM", "the stream ended before its answer did")
        return Reply(
            arrivals=tuple(self._arrivals),
            prompt_tokens=last.parameters["prompt_tokens"].int64_param,
            output_tokens=self._tokens,
            cached_tokens=last.parameters["cached_prompt_tokens"].int64_param,
            text=b"".join(self._texts).decode(errors="replace"),
        )
