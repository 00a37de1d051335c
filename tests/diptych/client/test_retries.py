"""Which calls gRPC repeats under the client's service config, and what stays of a stream that broke."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NoReturn

import grpc
import pytest

from diptych.client import AsyncClient, CallFailed, Client
from diptych.client.channel import MAX_RETRIES
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.diptych.client.served import served

Code = grpc.StatusCode
PUSHBACK_MS = 300


class Failing(rpc.InferenceServiceServicer):
    """Fails `failures` times with `code`, `delivered` messages after the beginning; then answers."""

    def __init__(self) -> None:
        self.code, self.failures, self.delivered = Code.UNAVAILABLE, 0, 0
        self.pushback: str | None = "1"
        self.about_prompt = False  # whether the first message of a stream has no output
        self.calls: list[float] = []

    def _fail(self, context: grpc.ServicerContext) -> NoReturn:
        if self.pushback is not None:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", self.pushback),))
        context.abort(self.code, "not now")
        raise AssertionError

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self.calls.append(time.monotonic())
        if len(self.calls) <= self.failures:
            self._fail(context)
        return pb.GenerateResponse(outputs=[pb.OutputDelta(text="done")])

    def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.calls.append(time.monotonic())
        head = pb.GenerateResponse(request_id="r1", model="small", resume_token="t1")
        head.outputs.add(index=0, text="The", token_ids=[1])
        head.outputs.add(index=1, text="A", token_ids=[9])
        end = pb.GenerateResponse(outputs=[pb.OutputDelta(text=" end", token_ids=[2])])
        prompt = pb.GenerateResponse(prompt=pb.PromptInfo(token_count=1))
        messages = [prompt, head, end] if self.about_prompt else [head, end]
        if len(self.calls) <= self.failures:
            yield from messages[: self.delivered]
            self._fail(context)
        yield from messages


@pytest.fixture
def server() -> Iterator[tuple[Failing, str]]:
    service = Failing()
    with served(service) as address:
        yield service, address


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.CANCELLED])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_delivered_nothing_is_repeated(
    server: tuple[Failing, str], code: grpc.StatusCode, streamed: bool
) -> None:
    service, address = server
    service.code, service.failures = code, 2
    with Client(address, model="small") as client:
        if streamed:
            assert "".join(chunk.text for chunk in client.stream("x")) == "The end"
        else:
            assert client.generate("x").text == "done"
    assert len(service.calls) == 3


async def test_the_asynchronous_client_repeats_as_well(server: tuple[Failing, str]) -> None:
    service, address = server
    service.failures = 1
    async with AsyncClient(address, model="small") as client:
        async with client.stream("x") as stream:
            assert [chunk.text async for chunk in stream] == ["The", " end"]
        assert stream.received.completion().text == "The end"
    assert len(service.calls) == 2


def test_retry_waits_as_the_server_asks(server: tuple[Failing, str]) -> None:
    service, address = server
    service.failures, service.pushback = 1, str(PUSHBACK_MS)
    with Client(address, model="small") as client:
        client.generate("x")
    first, second = service.calls
    assert second - first >= PUSHBACK_MS / 1000 * 0.9


def test_retry_is_not_made_when_the_server_forbids_it(server: tuple[Failing, str]) -> None:
    service, address = server
    service.failures, service.pushback = 1, "-1"
    with Client(address, model="small") as client, pytest.raises(CallFailed) as caught:
        client.generate("x")
    assert (caught.value.code, caught.value.retry_after_s) == (Code.UNAVAILABLE, None)
    assert len(service.calls) == 1


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.INVALID_ARGUMENT, Code.ABORTED, Code.NOT_FOUND])
def test_other_failures_are_final(server: tuple[Failing, str], code: grpc.StatusCode) -> None:
    service, address = server
    service.code, service.failures = code, 1
    with Client(address, model="small") as client, pytest.raises(CallFailed) as caught:
        client.generate("x")
    assert caught.value.code is code
    assert len(service.calls) == 1


def test_the_last_attempt_is_the_answer(server: tuple[Failing, str]) -> None:
    service, address = server
    service.failures = 10
    with Client(address, model="small", retries=2) as client, pytest.raises(CallFailed):
        client.generate("x")
    assert len(service.calls) == 3
    with Client(address, model="small", retries=0) as client, pytest.raises(CallFailed):
        client.generate("x")
    assert len(service.calls) == 4


def test_a_stream_that_began_is_not_repeated_and_keeps_what_came(server: tuple[Failing, str]) -> None:
    service, address = server
    service.code, service.failures, service.delivered = Code.UNAVAILABLE, 1, 1
    with Client(address, model="small") as client, client.stream("x") as stream:
        with pytest.raises(CallFailed) as caught:
            list(stream)
        received = stream.received
    assert (caught.value.code, caught.value.retry_after_s) == (Code.ABORTED, 0.001)
    assert str(caught.value) == "ABORTED: the stream broke after output was delivered: not now"
    assert len(service.calls) == 1
    answer = received.completion()
    assert (answer.request_id, answer.model, answer.text, answer.token_ids) == ("r1", "small", "The", (1,))
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "The"), (1, "A")]
    assert answer.finish_reason is None
    assert received.resume_token == "t1"


async def test_an_asynchronous_stream_that_began_was_aborted_too(server: tuple[Failing, str]) -> None:
    service, address = server
    service.failures, service.delivered = 1, 1
    async with AsyncClient(address, model="small") as client, client.stream("x") as stream:
        with pytest.raises(CallFailed, match="not now") as caught:
            [chunk async for chunk in stream]
    assert (caught.value.code, len(service.calls)) == (Code.ABORTED, 1)
    assert stream.received.completion().text == "The"


def test_a_message_about_the_prompt_is_no_output(server: tuple[Failing, str]) -> None:
    service, address = server
    service.failures, service.delivered, service.about_prompt = 1, 1, True
    with Client(address, model="small") as client, pytest.raises(CallFailed) as caught:
        list(client.stream("x"))
    assert (caught.value.code, len(service.calls)) == (Code.UNAVAILABLE, 1)


def test_failure_before_any_output_is_unavailable() -> None:
    with Client("127.0.0.1:1", model="small", retries=0) as client:
        stream = client.stream("x")
        assert stream.received.completion().choices == ()
        with pytest.raises(CallFailed) as caught:
            next(stream)
    assert caught.value.code is Code.UNAVAILABLE
    assert stream.received.completion().text == stream.received.resume_token == ""


@pytest.mark.parametrize("retries", [-1, MAX_RETRIES + 1])
def test_grpc_bounds_the_retries(retries: int) -> None:
    with pytest.raises(ValueError, match="retries"):
        Client("127.0.0.1:1", retries=retries)
