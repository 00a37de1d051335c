"""Against a real grpc.aio server of the protocol with scripted answers, over loopback."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from diptych.bench.backends import Unreachable
from diptych.bench.backends.kserve import KServeBackend
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.request import BenchRequest, Reply, RequestFailed
from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.kserve.v2 import open_inference_pb2_grpc as rpc

REQUEST = BenchRequest((5, 6, 7), 4)


def piece(text: bytes, ids: list[int], *, final: bool = False) -> oip.ModelStreamInferResponse:
    message = oip.ModelStreamInferResponse()
    response = message.infer_response
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    response.outputs.add(name="token_ids", datatype="INT64", shape=[len(ids)])
    response.raw_output_contents.append(struct.pack("<I", len(text)) + text)
    response.raw_output_contents.append(struct.pack(f"<{len(ids)}q", *ids))
    response.parameters["triton_final_response"].bool_param = final
    if final:
        response.parameters["prompt_tokens"].int64_param = 3
        response.parameters["cached_prompt_tokens"].int64_param = 2
    return message


class Scripted(rpc.GRPCInferenceServiceServicer):
    """Answers every request with the same messages."""

    def __init__(self, *answer: oip.ModelStreamInferResponse) -> None:
        self.answer = answer
        self.seen: list[oip.ModelInferRequest] = []

    async def ModelStreamInfer(
        self, requests: AsyncIterator[oip.ModelInferRequest], context: Any
    ) -> AsyncIterator[oip.ModelStreamInferResponse]:
        async for request in requests:
            self.seen.append(request)
            for message in self.answer:
                yield message


@asynccontextmanager
async def serving(service: Scripted) -> AsyncIterator[str]:
    server = grpc.aio.server()
    rpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def asked(service: Scripted, request: BenchRequest, asking: Asking) -> Reply:
    async with serving(service) as address:
        backend = KServeBackend(address, asking)
        try:
            return await backend.send(request)
        finally:
            await backend.close()


async def test_send_joins_the_pieces_of_an_answer() -> None:
    seen: list[float] = []
    service = Scripted(piece(b"a\xc3", [1, 2]), piece(b"\xa9", [3]), piece(b"", [], final=True))
    reply = await asked(service, REQUEST, Asking(model="m", on_output=seen.append))
    assert (reply.text, reply.output_tokens) == ("aé", 3)
    assert (reply.prompt_tokens, reply.cached_tokens) == (3, 2)
    assert len(reply.arrivals) == 2  # the end is no output
    assert tuple(seen) == reply.arrivals


async def test_asks_for_what_the_flags_say() -> None:
    service = Scripted(piece(b"a", [1], final=True))
    await asked(service, REQUEST, Asking(model="m", temperature=0.5))
    await asked(service, BenchRequest("Hé", 9), Asking(model="m", ignore_eos=False))
    ids, text = service.seen
    assert (ids.inputs[0].name, list(ids.inputs[0].shape)) == ("token_ids", [3])
    assert ids.raw_input_contents[0] == struct.pack("<3i", 5, 6, 7)
    assert ids.parameters["max_tokens"].int64_param == 4
    assert ids.parameters["temperature"].double_param == 0.5
    assert ids.parameters["ignore_eos"].bool_param
    assert text.inputs[0].name == "text_input"
    assert text.raw_input_contents[0] == b"\3\0\0\0" + "Hé".encode()
    assert not text.parameters["ignore_eos"].bool_param


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([oip.ModelStreamInferResponse(error_message="RESOURCE_EXHAUSTED QUEUE_FULL: full")], "QUEUE_FULL"),
        ([oip.ModelStreamInferResponse(error_message="what")], "what"),
        ([piece(b"a", [1])], "BROKEN_STREAM"),
        ([piece(b"", [], final=True)], "NO_OUTPUT"),
        ([], "NO_OUTPUT"),
    ],
)
async def test_what_does_not_end_well_is_a_failure(
    answer: list[oip.ModelStreamInferResponse], reason: str
) -> None:
    with pytest.raises(RequestFailed, match=reason):
        await asked(Scripted(*answer), REQUEST, Asking(model="m"))


async def test_model_raises_unreachable_without_a_server() -> None:
    backend = KServeBackend("127.0.0.1:1", Asking())
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        await backend.model()
    await backend.close()
