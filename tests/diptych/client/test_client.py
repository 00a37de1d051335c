"""The client against a real gRPC server that answers as the protocol says."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from diptych.client import AsyncClient, CallFailed, Client, chat
from diptych.client.credentials import Access
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.diptych.client.served import served

WORDS = ("The", " capital", " is", " Paris.")


class Inference(rpc.InferenceServiceServicer):
    """Answers every prompt with WORDS, except for the prompts "refuse", "hang" and "long"."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.listed = 0
        self.silent = False  # whether ListModels never answers
        self.cancelled = threading.Event()

    def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        self.listed += 1
        while self.silent and context.is_active():
            threading.Event().wait(0.01)
        return pb.ListModelsResponse(models=[pb.Model(name="small"), pb.Model(name="other")])

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self.requests.append(request)
        if request.text == "refuse":
            context.abort_with_status(rpc_status.to_status(refusal()))
        if request.text == "hang":
            while context.is_active():
                threading.Event().wait(0.01)
        text = "x" * 5_000_000 if request.text == "long" else "".join(WORDS)
        last = pb.OutputDelta(text=text, token_ids=[1, 2, 3, 4], finish_reason=pb.FINISH_REASON_STOP)
        return pb.GenerateResponse(request_id="r1", outputs=[last], usage=USAGE, timings=TIMINGS)

    def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        context.add_callback(self.cancelled.set)
        for index, word in enumerate(WORDS):
            yield pb.GenerateResponse(outputs=[pb.OutputDelta(text=word, token_ids=[index])])
            if request.text == "hang":
                self.cancelled.wait(10)
            if request.text == "break":
                context.abort(grpc.StatusCode.ABORTED, "the worker is gone")
        end = pb.OutputDelta(finish_reason=pb.FINISH_REASON_LENGTH)
        yield pb.GenerateResponse(outputs=[end], usage=USAGE, timings=TIMINGS)


USAGE = pb.Usage(prompt_tokens=9, completion_tokens=4, total_tokens=13, cached_prompt_tokens=5)
TIMINGS = pb.Timings(
    prefill=duration_pb2.Duration(nanos=250_000_000),
    total=duration_pb2.Duration(seconds=1, nanos=500_000_000),
    kv_bytes_transferred=7,
)


def refusal() -> status_pb2.Status:
    details = [
        error_details_pb2.ErrorInfo(reason="INVALID_PARAMETER", domain="diptych", metadata={"limit": "2"}),
        error_details_pb2.RequestInfo(request_id="r9"),
        error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=500_000_000)),
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="above 1")
            ]
        ),
    ]
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="bad request", details=packed)


@pytest.fixture
def service() -> Inference:
    return Inference()


@pytest.fixture
def address(service: Inference) -> Iterator[str]:
    with served(service, options=[("grpc.max_send_message_length", 64 << 20)]) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client


@pytest.fixture
async def aio(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address) as client:
        yield client


def test_generate_returns_a_whole_answer(client: Client, service: Inference) -> None:
    answer = client.generate(
        chat("Where?", system="Be brief."), max_tokens=4, temperature=0.0, seed=0, stop=["."]
    )

    assert (answer.request_id, answer.text, answer.finish_reason) == ("r1", "The capital is Paris.", "stop")
    assert answer.token_ids == (1, 2, 3, 4)
    assert answer.usage is not None
    assert answer.usage.cached_prompt_tokens == 5
    assert answer.timings is not None
    assert (answer.timings.prefill, answer.timings.total) == (0.25, 1.5)
    [request] = service.requests
    assert request.model == "small"
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Where?"),
    ]
    assert request.sampling.HasField("temperature")  # a zero that was given is a zero, not an absence
    assert request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_p")
    assert list(request.stopping.stop) == ["."]


def test_text_ids_and_an_empty_prompt_stay_what_they_are(client: Client, service: Inference) -> None:
    for prompt in ("Once", [5, 6], []):
        client.generate(prompt)
    kinds = [request.WhichOneof("prompt") for request in service.requests]
    assert kinds == ["text", "token_ids", "token_ids"]
    assert list(service.requests[1].token_ids.ids) == [5, 6]
    assert service.listed == 1


def test_a_stream_is_deltas_with_the_account_at_its_end(client: Client) -> None:
    chunks = list(client.stream("Where?"))
    assert tuple(chunk.text for chunk in chunks if chunk.text) == WORDS
    assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + ["length"]
    assert chunks[-1].timings is not None
    assert chunks[-1].timings.kv_bytes_transferred == 7


def test_leaving_a_stream_cancels_it(client: Client, service: Inference) -> None:
    stream = client.stream("hang")
    next(stream)
    stream.close()
    assert service.cancelled.wait(5)


def test_generate_raises_a_typed_failure(client: Client) -> None:
    with pytest.raises(CallFailed) as caught:
        client.generate("refuse")
    failure = caught.value
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (failure.reason, failure.request_id, failure.retry_after_s) == ("INVALID_PARAMETER", "r9", 0.5)
    assert failure.violations == {"sampling.top_p": "above 1"}
    assert failure.metadata == {"limit": "2"}
    assert str(failure) == "INVALID_ARGUMENT (INVALID_PARAMETER): bad request"


def test_a_stream_that_breaks_says_so_after_what_it_delivered(client: Client) -> None:
    stream = client.stream("break")
    assert next(stream).text == "The"
    with pytest.raises(CallFailed) as caught:
        next(stream)
    assert caught.value.code is grpc.StatusCode.ABORTED


def test_the_deadline_ends_a_call(client: Client) -> None:
    with pytest.raises(CallFailed) as caught:
        client.generate("hang", timeout_s=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("timeout_s", [9e9, 1e18, float("inf")])
@pytest.mark.parametrize("resume", [False, True])
async def test_a_time_beyond_all_counting_is_no_deadline(
    client: Client, aio: AsyncClient, timeout_s: float, resume: bool
) -> None:
    texts = [chunk.text for chunk in client.stream("Where?", timeout_s=timeout_s, resume=resume)]
    assert texts == [chunk.text async for chunk in aio.stream("Where?", timeout_s=timeout_s, resume=resume)]
    assert "".join(texts) == client.generate("Where?", timeout_s=timeout_s).text
    assert (await aio.generate("Where?", timeout_s=timeout_s)).text == "".join(WORDS)
    assert client.models(timeout_s=timeout_s) == await aio.models(timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("-inf")])
async def test_what_is_no_length_of_time_is_refused(
    client: Client, aio: AsyncClient, service: Inference, timeout_s: float
) -> None:
    for resume in (False, True):
        with pytest.raises(ValueError, match="timeout_s"):
            client.stream("Where?", timeout_s=timeout_s, resume=resume)
        with pytest.raises(ValueError, match="timeout_s"):
            aio.stream("Where?", timeout_s=timeout_s, resume=resume)
    with pytest.raises(ValueError, match="timeout_s"):
        client.generate("Where?", timeout_s=timeout_s)
    with pytest.raises(ValueError, match="timeout_s"):
        await aio.generate("Where?", timeout_s=timeout_s)
    assert service.requests == []


def test_an_answer_may_be_longer_than_grpc_expects(client: Client) -> None:
    assert len(client.generate("long").text) == 5_000_000


def test_an_unknown_option_never_leaves_the_client(client: Client, service: Inference) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.generate("hello", temprature=1.0)
    assert service.requests == []


async def test_async_client_gives_the_same_results(aio: AsyncClient, service: Inference) -> None:
    answer = await aio.generate(chat("Where?"), max_tokens=4)
    texts = [chunk.text async for chunk in aio.stream(chat("Where?"))]
    assert "".join(texts) == answer.text == "".join(WORDS)
    with pytest.raises(CallFailed) as caught:
        await aio.generate("refuse")
    assert caught.value.violations == {"sampling.top_p": "above 1"}
    assert service.listed == 1


async def test_leaving_an_asynchronous_stream_cancels_it(aio: AsyncClient, service: Inference) -> None:
    async with aclosing(aio.stream("hang")) as stream:
        async for _ in stream:
            break
    assert await asyncio.to_thread(service.cancelled.wait, 5)


def test_a_key_that_was_read_from_a_file_ends_where_its_text_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would call the new line invalid metadata."""
    monkeypatch.setenv("DIPTYCH_API_KEY", "dk-1\n")
    assert Access.from_environment().metadata == (("authorization", "Bearer dk-1"),)
    assert Access(" dk-1\r\n") == Access("dk-1")
    with pytest.raises(ValueError, match="printable ASCII"):
        Access("dk-…")
    monkeypatch.setenv("DIPTYCH_API_KEY", "dk-…")
    assert Access.from_environment("dk-1") == Access("dk-1"), "nobody looks at the variable then"
    monkeypatch.setenv("DIPTYCH_API_KEY", " \n")
    assert Access.from_environment().metadata == ()


def test_the_timeout_is_for_the_look_up_of_the_model_as_well(address: str, service: Inference) -> None:
    service.silent = True

    async def asked() -> list[CallFailed]:
        async with AsyncClient(address) as client:
            failures = []
            for call in (
                client.generate("x", timeout_s=0.2),
                client.tokenize("x", timeout_s=0.2),
                anext(aiter(client.stream("x", timeout_s=0.2))),
            ):
                with pytest.raises(CallFailed) as failed:
                    await call
                failures.append(failed.value)
            return failures

    with Client(address) as client:
        for call in (client.generate, client.tokenize, lambda *a, **b: next(iter(client.stream(*a, **b)))):
            with pytest.raises(CallFailed) as failed:
                call("x", timeout_s=0.2)
            assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [one.code for one in asyncio.run(asked())] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 3


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_url_in_place_of_an_address_is_refused(client: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="an address is host:port, not the URL"):
        client("http://127.0.0.1:8000")
