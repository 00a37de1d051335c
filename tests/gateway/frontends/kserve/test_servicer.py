"""The KServe frontend through real sockets, with scripted workers behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from diptych.client.failure import read_failure
from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.kserve.v2 import open_inference_pb2_grpc
from diptych.worker.v1 import decode_pb2, work_pb2
from gateway.frontends.grpc.grpc_service import Context, GrpcCall
from gateway.frontends.kserve import servicer
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.kserve.tensors import MODEL, asking, outputs, text
from tests.gateway.running_gateway import Stack, running
from tests.gateway.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, answering

TEXT = " One two three four five."


@contextlib.asynccontextmanager
async def gateway_api(
    model: ServedModel, redis_url: str, script: Script | None = None, **settings: Any
) -> AsyncIterator[tuple[Stack, Any, ScriptedDecode]]:
    """A gateway whose model says ``TEXT``, unless a script says otherwise, and a stub of the protocol."""
    decode = ScriptedDecode(script or answering(ids_of(model), pause_s=0.005))
    async with running(model, redis_url, ScriptedPrefill(), decode, **settings) as stack:
        yield stack, open_inference_pb2_grpc.GRPCInferenceServiceStub(stack.channel), decode
        await stack.until_idle()


def ids_of(model: ServedModel) -> list[int]:
    return model.tokenizer.encode(TEXT, add_special=False)


async def silent(worker: ScriptedDecode, work: work_pb2.Work) -> None:
    """Attached, and nothing comes."""


async def collect(call: Any) -> dict[str, list[oip.ModelStreamInferResponse]]:
    """Request id → its messages, to the end of the stream."""
    found: dict[str, list[oip.ModelStreamInferResponse]] = {}
    async for message in call:
        found.setdefault(message.infer_response.id, []).append(message)
    return found


def stream(stub: Any, *requests: oip.ModelInferRequest, **options: Any) -> Any:
    """All requests at once on one stream whose sending side is then closed."""
    return stub.ModelStreamInfer(iter(requests), **options)


def answers(messages: list[oip.ModelStreamInferResponse]) -> list[oip.ModelInferResponse]:
    assert not any(message.error_message for message in messages)
    return [message.infer_response for message in messages]


def final(messages: list[oip.ModelStreamInferResponse]) -> list[bool]:
    return [m.infer_response.parameters["triton_final_response"].bool_param for m in messages]


async def test_metadata_describes_server_and_model(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, stub, _):
        assert (await stub.ServerLive(oip.ServerLiveRequest())).live
        assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
        assert (await stub.ModelReady(oip.ModelReadyRequest(name=MODEL))).ready
        assert (await stub.ServerMetadata(oip.ServerMetadataRequest())).name == "diptych"
        metadata = await stub.ModelMetadata(oip.ModelMetadataRequest(name=MODEL, version="1"))
        assert (metadata.name, list(metadata.versions)) == (MODEL, ["1"])
        assert [t.name for t in metadata.inputs] == ["text_input", "token_ids", "sampling_parameters"]
        assert [t.name for t in metadata.outputs] == ["text_output", "token_ids", "finish_reason"]
        for bad, code in (("", "INVALID_ARGUMENT"), ("other", "NOT_FOUND")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelReady(oip.ModelReadyRequest(name=bad))
            assert refused.value.code().name == code
        await stack.gateway.drain()
        assert (await stub.ServerLive(oip.ServerLiveRequest())).live
        assert not (await stub.ServerReady(oip.ServerReadyRequest())).ready
        assert not (await stub.ModelReady(oip.ModelReadyRequest(name=MODEL))).ready


async def test_without_workers_it_is_not_ready(bundled: ServedModel, redis_url: str) -> None:
    async with running(bundled, redis_url, worker_wait_timeout=0) as stack:
        stub: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub(stack.channel)
        assert not (await stub.ServerReady(oip.ServerReadyRequest())).ready
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(asking())
        assert read_failure(refused.value).reason == "NO_READY_WORKER"


async def test_whole_answer_has_text_ids_and_usage(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, stub, decode):
        response = await stub.ModelInfer(asking(id="mine", max_tokens=9, temperature=0.5, timeout=30_000_000))
        (work,) = await decode.wait_for("attach")
    assert response.id == "mine"
    assert outputs(response) == {
        "text_output": [TEXT.encode()],
        "token_ids": ids_of(bundled),
        "finish_reason": [b"length"],
    }
    assert response.parameters["completion_tokens"].int64_param == len(ids_of(bundled))
    assert work.stopping.max_tokens == 9
    assert work.sampling.temperature == 0.5


@pytest.mark.parametrize("name", ["text_output", "token_ids", "finish_reason"])
async def test_one_output_tensor_comes_alone(bundled: ServedModel, redis_url: str, name: str) -> None:
    request = asking(id="r")
    request.outputs.add(name=name)
    async with gateway_api(bundled, redis_url) as (_, stub, _):
        whole = await stub.ModelInfer(request)
        pieces = answers((await collect(stream(stub, request)))["r"])
    assert list(outputs(whole)) == [name]
    assert b"".join(outputs(p)["finish_reason"][0] for p in pieces if name == "finish_reason") in (
        b"",
        b"length",
    )
    assert all(list(outputs(piece)) == [name] for piece in pieces)


async def test_refusals_are_statuses_of_unary_calls(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, stub, _):
        for request, field in (
            (asking(top_p=2.0), "parameters[top_p]"),
            (asking(colour=1), "parameters[colour]"),
            (asking(stream=True), "parameters[stream]"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(request)
            failure = read_failure(refused.value)
            assert (failure.code.name, list(failure.violations)) == ("INVALID_ARGUMENT", [field])
        garbage = stack.channel.unary_unary(f"/{servicer.SERVICE}/ModelInfer")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await garbage(b"\xff\xff")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_requests_of_a_stream_run_side_by_side(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, stub, decode):
        call = stub.ModelStreamInfer()
        order: list[str] = []
        found: dict[str, list[oip.ModelStreamInferResponse]] = {}
        for name in ("a", "b", "c"):
            await call.write(asking(id=name))
        await decode.wait_for("attach", 3)  # none waits for another
        await call.write(asking(id="whole", stream=False))
        await call.write(asking(""))  # without an id, and bad
        await call.done_writing()
        async for message in call:
            order.append(message.infer_response.id)
            found.setdefault(message.infer_response.id, []).append(message)
        assert await call.code() is grpc.StatusCode.OK
    assert len(set(order[:6])) >= 3
    for name in ("a", "b", "c"):
        assert text(answers(found[name])) == TEXT
        assert final(found[name]) == [False] * (len(found[name]) - 1) + [True]
        assert len(found[name]) > 2
    (whole,) = answers(found["whole"])
    assert (text([whole]), final(found["whole"])) == (TEXT, [True])
    (error,) = found[""]
    assert error.error_message.startswith("INVALID_ARGUMENT INVALID_PARAMETER: inputs[text_input]: ")
    assert final([error]) == [True]


async def test_an_error_of_one_leaves_the_others_alone(bundled: ServedModel, redis_url: str) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if work.stopping.max_tokens == 7:
            worker.tokens(work, 0, ids_of(bundled)[:2])
            await asyncio.sleep(0.05)
            worker.fail(work, work_pb2.FAILURE_REASON_NO_VALID_TOKEN)
        else:
            await answering(ids_of(bundled), pause_s=0.02)(worker, work)

    async with gateway_api(bundled, redis_url, script) as (_, stub, _):
        good, same = asking(id="good"), asking(id="good")
        bad, unknown = asking(id="bad", max_tokens=7), asking(id="unknown")
        unknown.model_name = "other"
        found = await collect(stream(stub, good, bad, unknown, same))
    errors = {name: [m.error_message for m in found[name] if m.error_message] for name in found}
    assert [error.split(":")[0] for error in errors["unknown"]] == ["NOT_FOUND UNKNOWN_MODEL"]
    assert [error.split(":")[0] for error in errors["good"]] == ["ALREADY_EXISTS DUPLICATE_REQUEST"]
    assert [error.split(":")[0] for error in errors["bad"]] == ["FAILED_PRECONDITION NO_VALID_TOKEN"]
    assert text(answers([m for m in found["bad"] if not m.error_message])) == " One two"
    assert text(answers([m for m in found["good"] if not m.error_message])) == TEXT


async def test_garbage_on_a_stream_is_one_error(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        raw = stack.channel.stream_stream(
            f"/{servicer.SERVICE}/ModelStreamInfer",
            response_deserializer=oip.ModelStreamInferResponse.FromString,
        )
        found = await collect(raw(iter([b"\xff\xff", asking(id="good").SerializeToString()])))
    assert found[""][0].error_message.startswith("INVALID_ARGUMENT INVALID_PARAMETER: request: ")
    assert text(answers(found["good"])) == TEXT


async def test_a_cancelled_stream_cancels_all_of_it(bundled: ServedModel, redis_url: str) -> None:
    slow = answering(ids_of(bundled) * 50, pause_s=0.02)
    async with gateway_api(bundled, redis_url, slow) as (stack, stub, decode):
        call = stub.ModelStreamInfer()
        for name in ("a", "b"):
            await call.write(asking(id=name, max_tokens=400))
        seen = {(await call.read()).infer_response.id for _ in range(6)}
        call.cancel()
        cancelled = await decode.wait_for("cancel", 2)
        await stack.until_idle()
        assert seen == {"a", "b"}
        assert len({message.id.request_id for message in cancelled}) == 2
        whole = stub.ModelInfer(asking(max_tokens=400))
        await decode.wait_for("attach", 3)
        whole.cancel()
        await decode.wait_for("cancel", 3)


async def test_timeouts_of_stream_and_request_end_with_deadline_exceeded(
    bundled: ServedModel, redis_url: str
) -> None:
    """The request's own, in microseconds, ends it alone; the RPC's ends all of a stream."""
    async with gateway_api(bundled, redis_url, silent) as (_, stub, decode):
        for options in ({"request": asking(timeout=200_000)}, {"request": asking(), "timeout": 0.2}):
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await stub.ModelInfer(**options)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call = stub.ModelStreamInfer()
        await call.write(asking(id="short", timeout=200_000))
        await call.write(asking(id="long"))
        error = await call.read()
        assert error.infer_response.id == "short"
        assert error.error_message.startswith("DEADLINE_EXCEEDED DEADLINE_EXCEEDED: ")
        assert not call.done()
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await collect(stream(stub, asking(id="a"), asking(id="b"), timeout=0.3))
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await decode.wait_for("cancel", 6)


async def test_a_stream_out_of_time_by_the_gateways_clock_ends_with_that(
    bundled: ServedModel, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never with OK, though the requests end before gRPC's timer does."""

    usual = GrpcCall.__init__

    def early(call: GrpcCall, method: str, context: Context, received_at: float, *more: Any) -> None:
        usual(call, method, context, received_at - 29.8, *more)

    monkeypatch.setattr(GrpcCall, "__init__", early)
    async with gateway_api(bundled, redis_url, silent) as (_, stub, decode):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await collect(stream(stub, asking(id="a"), asking(id="b"), timeout=30))
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "deadline" in (ended.value.details() or "").lower()
        await decode.wait_for("cancel", 2)


def saying_letters(bundled: ServedModel) -> Script:
    """Choice 0 says one token, choice 1 two."""
    ids = ids_of(bundled)

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        for index in range(2):
            alive = [choice for choice in work.choices if choice >= index]
            tokens = [
                work_pb2.Tokens(id=work.id, choice=choice, index=index, token_ids=[ids[choice + index]])
                for choice in alive
            ]
            length = work_pb2.FINISH_REASON_LENGTH
            ended = [
                decode_pb2.DecodeEnded(id=work.id, choice=choice, finished=length)
                for choice in alive
                if choice == index
            ]
            worker.say(step=decode_pb2.StepBatch(tokens=tokens, ended=ended))
            await asyncio.sleep(0.02)

    return script


async def test_choices_are_numbered(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url, saying_letters(bundled)) as (_, stub, _):
        whole = await stub.ModelInfer(asking(n=2))
        found = await collect(stream(stub, asking(id="r", n=2)))
    assert outputs(whole) == {"text_output": [b" One", b" two three"], "finish_reason": [b"length"] * 2}
    assert whole.parameters["completion_tokens"].int64_param == 3
    pieces = answers(found["r"])
    choices: dict[int, list[oip.ModelInferResponse]] = {0: [], 1: []}
    for piece in pieces:
        choices[piece.parameters["index"].int64_param].append(piece)
    assert {index: text(said) for index, said in choices.items()} == {0: " One", 1: " two three"}
    assert final(found["r"]) == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].parameters["completion_tokens"].int64_param == 3


async def test_a_stream_takes_no_more_than_its_places(
    bundled: ServedModel, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "MAX_RUNNING", 2)
    async with gateway_api(bundled, redis_url) as (_, stub, decode):
        found = await collect(stream(stub, *(asking(id=str(i)) for i in range(5))))
        assert len(await decode.wait_for("attach", 5)) == 5
    assert {name: text(answers(messages)) for name, messages in found.items()} == {
        str(i): TEXT for i in range(5)
    }
