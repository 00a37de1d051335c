"""The OpenAI frontend through real sockets: OpenAI's own client, and aiohttp for what that cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import openai
import pytest

from diptych.worker.v1 import work_pb2
from gateway import limits
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import Stack, running, until
from tests.gateway.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, answering

TEXT = " One two three four five."


@contextlib.asynccontextmanager
async def gateway_api(
    model: ServedModel, redis_url: str, script: Script | None = None, **settings: Any
) -> AsyncIterator[tuple[Stack, openai.AsyncOpenAI, ScriptedDecode]]:
    """A gateway whose model says ``TEXT``, unless a script says otherwise, and OpenAI's client for it."""
    decode = ScriptedDecode(script or answering(ids_of(model)))
    async with (
        running(model, redis_url, ScriptedPrefill(), decode, **settings) as stack,
        openai.AsyncOpenAI(base_url=f"{root(stack)}/v1", api_key="any", max_retries=0) as client,
    ):
        yield stack, client, decode


def ids_of(model: ServedModel) -> list[int]:
    return model.tokenizer.encode(TEXT, add_special=False)


def root(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.gateway.http_port}"


async def post(stack: Stack, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], Any]:
    """Status, JSON, headers. ``body``: JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{root(stack)}{path}", data=data, headers=sent) as answer,
    ):
        return answer.status, await answer.json(), answer.headers


async def test_a_completion_as_a_whole(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, client, _):
        answer = await client.completions.create(model=bundled.card.name, prompt="Count:", max_tokens=32)
    assert answer.object == "text_completion"
    assert answer.model == bundled.card.name
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint is not None
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, TEXT, "length", None)
    assert answer.usage is not None
    prompt_tokens = len(bundled.tokenizer.encode("Count:", add_special=True))
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == len(ids_of(bundled))
    assert answer.usage.total_tokens == prompt_tokens + len(ids_of(bundled))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_completion(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, client, _):
        stream = await client.completions.create(model=bundled.card.name, prompt="Count:", stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert {chunk.usage for chunk in chunks} == {None}
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_chat_as_a_whole_and_streamed(bundled: ServedModel, redis_url: str) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Count "}, {"type": "text", "text": "up"}]},
    ]
    async with gateway_api(bundled, redis_url) as (_, client, decode):
        whole = await client.chat.completions.create(model=bundled.card.name, messages=messages)
        stream = await client.chat.completions.create(
            model=bundled.card.name, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        first, second = await decode.wait_for("attach", 2)
    assert first.token_ids == second.token_ids
    assert "Count up" in bundled.tokenizer.decode(list(first.token_ids), False)
    message = whole.choices[0].message
    assert (whole.object, message.role, message.content) == ("chat.completion", "assistant", TEXT)
    assert message.tool_calls is None
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert {piece.choices[0].delta.role for piece in pieces[1:]} == {None}
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == TEXT
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage == whole.usage


async def test_knobs_reach_the_workers(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, client, decode):
        await client.completions.create(
            model=bundled.card.name,
            prompt="x",
            max_tokens=7,
            temperature=0.5,
            top_p=0.9,
            seed=-3,
            frequency_penalty=0.25,
            presence_penalty=-0.5,
            user="someone",
            extra_body={
                "top_k": 5,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "ignore_eos": True,
                "min_tokens": 2.0,
                "stop_token_ids": [17],
                "metadata": {"a": "b"},
                "store": True,
                "logit_bias": None,
            },
        )
        (work,) = await decode.wait_for("attach")
    assert work.sampling.temperature == 0.5
    assert work.sampling.top_p == pytest.approx(0.9)
    assert (work.sampling.top_k, work.sampling.min_p) == (5, 0.125)
    assert work.sampling.seed == 2**64 - 3
    assert work.sampling.frequency_penalty == 0.25
    assert work.sampling.presence_penalty == -0.5
    assert work.sampling.repetition_penalty == 1.5
    assert (work.stopping.max_tokens, work.stopping.min_tokens) == (7, 2)
    assert list(work.stopping.stop_token_ids) == [17]


async def test_absent_max_tokens_is_16_for_completions_and_the_context_for_chats(
    bundled: ServedModel, redis_url: str
) -> None:
    async with gateway_api(bundled, redis_url) as (_, client, decode):
        await client.completions.create(model=bundled.card.name, prompt="x")
        await client.chat.completions.create(
            model=bundled.card.name, messages=[{"role": "user", "content": "x"}]
        )
        completion, chat = await decode.wait_for("attach", 2)
    assert completion.stopping.max_tokens == 16
    assert chat.stopping.max_tokens == bundled.card.max_context - chat.prompt_tokens


async def test_a_stop_string_ends_the_output_and_is_named(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, client, _):
        answer = await client.completions.create(model=bundled.card.name, prompt="x", stop=[" three"])
    assert answer.choices[0].text == " One two"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == " three"  # type: ignore[attr-defined]


async def test_models_are_listed_and_described(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, client, _):
        (listed,) = (await client.models.list()).data
        assert listed.id == bundled.card.name
        assert listed.max_model_len == bundled.card.max_context  # type: ignore[attr-defined]
        assert (await client.models.retrieve(listed.id)) == listed
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.models.retrieve("other/model")
    assert unknown.value.code == "model_not_found"


async def test_request_ids_come_back(bundled: ServedModel, redis_url: str) -> None:
    body = {"model": bundled.card.name, "prompt": "x"}
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        _, answer, headers = await post(stack, "/v1/completions", body, x_request_id="mine")
        assert (answer["id"], headers["x-request-id"]) == ("cmpl-mine", "mine")
        _, answer, headers = await post(stack, "/v1/completions", body)
        assert answer["id"] == f"cmpl-{headers['x-request-id']}"
        status, answer, headers = await post(
            stack, "/v1/completions", {**body, "top_p": 2}, x_request_id="bad"
        )
        assert (status, headers["x-request-id"]) == (400, "bad")
        foreign = "Root=1-67891233-abcdef012345678912345678"  # AWS's form
        _, answer, headers = await post(stack, "/v1/completions", body, x_request_id=foreign)
        name = foreign.replace("=", "_")
        assert (answer["id"], headers["x-request-id"]) == (f"cmpl-{name}", name)
        bad = {**body, "request_id": "no spaces"}
        status, answer, _ = await post(stack, "/v1/completions", bad, x_request_id="mine")
        assert (status, answer["error"]["param"]) == (400, "request_id")


async def test_a_client_that_leaves_cancels_on_both_workers(bundled: ServedModel, redis_url: str) -> None:
    slow = answering(ids_of(bundled) * 50, pause_s=0.02)
    async with gateway_api(bundled, redis_url, slow) as (stack, client, decode):
        stream = await client.completions.create(
            model=bundled.card.name, prompt="x", max_tokens=400, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        await decode.wait_for("cancel")
        await stack.until_idle()
        whole = asyncio.ensure_future(
            client.completions.create(model=bundled.card.name, prompt="x", max_tokens=400)
        )
        await decode.wait_for("attach", 2)
        whole.cancel()
        await decode.wait_for("cancel", 2)
        await stack.until_idle()


async def test_the_deadline_header(bundled: ServedModel, redis_url: str) -> None:
    async def silent(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        pass

    body = {"model": bundled.card.name, "prompt": "x"}
    async with gateway_api(bundled, redis_url, silent) as (stack, _, decode):
        for stream in (False, True):  # nothing went out, so both have a status
            status, answer, _ = await post(
                stack, "/v1/completions", {**body, "stream": stream}, x_request_timeout_ms="200"
            )
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
            assert answer["error"]["type"] == "timeout_error"
        await decode.wait_for("cancel", 2)
        for bad in ("0", "-1", "x", "1e3", "9" * 20, str(limits.MAX_TIMEOUT_MS + 1)):
            status, answer, _ = await post(stack, "/v1/completions", body, x_request_timeout_ms=bad)
            assert (status, answer["error"]["param"]) == (400, "x-request-timeout-ms")


async def test_an_error_in_mid_stream_is_an_event(bundled: ServedModel, redis_url: str) -> None:
    async def dies(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, ids_of(bundled)[:2])
        await asyncio.sleep(0.1)
        await worker.kill()

    async with gateway_api(bundled, redis_url, dies, worker_wait_timeout=0.3) as (_, client, _):
        stream = await client.completions.create(model=bundled.card.name, prompt="x", stream=True)
        seen: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                seen.append(chunk.choices[0].text)

        with pytest.raises(openai.APIError) as broken:
            await read()
    assert "".join(seen) == " One two"
    assert broken.value.code == "worker_lost"


async def test_overload_says_when_to_come_back(bundled: ServedModel, redis_url: str) -> None:
    async def silent(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        pass

    async with gateway_api(bundled, redis_url, silent, max_inflight=1, max_queued_tokens=200) as (
        stack,
        client,
        decode,
    ):
        body = {"model": bundled.card.name, "prompt": "word " * 50, "max_tokens": 4}
        first = asyncio.ensure_future(client.completions.create(**body))  # type: ignore[call-overload]
        await decode.wait_for("attach")
        second = asyncio.ensure_future(client.completions.create(**body))  # type: ignore[call-overload]
        await until(lambda: stack.core.gate.queue.waiting == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(**body)  # type: ignore[call-overload]
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        for task in (first, second):
            task.cancel()
        await stack.until_idle()


async def test_a_live_id_twice_is_a_conflict(bundled: ServedModel, redis_url: str) -> None:
    slow = answering(ids_of(bundled) * 50, pause_s=0.02)
    body: Any = {"model": bundled.card.name, "prompt": "x", "max_tokens": 400}
    async with gateway_api(bundled, redis_url, slow) as (stack, client, decode):
        named = {"request_id": "twin"}
        first = asyncio.ensure_future(client.completions.create(**body, extra_body=named))
        await decode.wait_for("attach")
        with pytest.raises(openai.ConflictError) as refused:
            await client.with_options(max_retries=2).completions.create(**body, extra_body=named)
        assert refused.value.code == "duplicate_request"
        first.cancel()
        await stack.until_idle()


async def test_one_header_may_name_several_live_requests(bundled: ServedModel, redis_url: str) -> None:
    """Meshes pass one x-request-id on to all calls that one action of a user causes."""
    async with gateway_api(bundled, redis_url) as (stack, client, _):
        ask = partial(client.completions.create, model=bundled.card.name, prompt="x")
        headers = {"x-request-id": "click"}
        answers = await asyncio.gather(*(ask(extra_headers=headers) for _ in range(3)))
        assert sorted(answer.id[:10] for answer in answers) == ["cmpl-click"] * 3
        assert len({answer.id for answer in answers}) == 3
        assert (await ask(extra_headers=headers)).id == "cmpl-click"
        await stack.until_idle()


async def test_without_workers_it_is_unavailable(bundled: ServedModel, redis_url: str) -> None:
    async with running(bundled, redis_url, worker_wait_timeout=0.2) as stack:
        status, answer, headers = await post(
            stack, "/v1/completions", {"model": bundled.card.name, "prompt": "x"}
        )
    assert (status, answer["error"]["code"]) == (503, "no_ready_worker")
    assert answer["error"]["type"] == "service_unavailable_error"
    assert int(headers["Retry-After"]) >= 1


async def test_requests_are_counted(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, client, _):
        await client.completions.create(model=bundled.card.name, prompt="x")
        await post(stack, "/v1/completions", {"model": "other", "prompt": "x"})
        for status in ("200", "404"):
            labels = {"http_route": "/v1/completions", "http_response_status_code": status}
            assert stack.registry.get_sample_value("http_server_request_duration_seconds_count", labels) == 1


async def test_a_header_gives_way_to_a_name_that_is_asked_for(bundled: ServedModel, redis_url: str) -> None:
    slow = answering(ids_of(bundled) * 50, pause_s=0.02)
    body: Any = {"model": bundled.card.name, "prompt": "x", "max_tokens": 400}
    async with gateway_api(bundled, redis_url, slow) as (stack, client, decode):
        first = asyncio.ensure_future(client.completions.create(**body, extra_body={"request_id": "job"}))
        await decode.wait_for("attach")
        second = await client.completions.create(**body, stream=True, extra_headers={"x-request-id": "job"})
        assert (await anext(aiter(second))).id.startswith("cmpl-job-")
        await second.close()
        first.cancel()
        await stack.until_idle()


@pytest.mark.parametrize("lenient", [False, True])
async def test_lenient_json_schema_leaves_out_what_cannot_be_held(
    bundled: ServedModel, redis_url: str, lenient: bool
) -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": "^(?!a)"}, "uniqueItems": True}
    body = {"model": bundled.card.name, "prompt": "a", "max_tokens": 32, "guided_json": schema}
    async with gateway_api(bundled, redis_url, lenient_json_schema=lenient) as (stack, _, _):
        status, answer, _ = await post(stack, "/v1/completions", body)
        assert status == (200 if lenient else 400)
        assert lenient or answer["error"]["param"] == "guided_json"


@pytest.mark.parametrize(
    ("path", "members", "rule"),
    [
        ("chat/completions", {"max_tokens": -1}, "max_tokens: must be from 1 to 4294967295"),
        ("completions", {"max_tokens": -1}, "max_tokens: must be from 1 to 4294967295, or 0 with echo"),
        ("completions", {"n": -1}, "n: must be from 1 to "),
        ("chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs: must be from 0 to 20"),
    ],
)
async def test_integer_beyond_its_field_is_answered_with_the_true_range(
    bundled: ServedModel, redis_url: str, path: str, members: dict[str, Any], rule: str
) -> None:
    prompt: Any = (
        {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        body = {"model": bundled.card.name, **prompt, **members}
        status, answer, _ = await post(stack, f"/v1/{path}", body)
    assert status == 400
    assert answer["error"]["message"].startswith(rule)
