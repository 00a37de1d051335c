"""Against a small HTTP server that streams server-sent events with scripted timing, over loopback."""

import asyncio
from typing import Any, Literal

import aiohttp
import pytest

from diptych.bench.backends import Unreachable, openai_http
from diptych.bench.backends.openai_http import OpenAIBackend
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.drive import Run, drive
from diptych.bench.load import Load
from diptych.bench.measurement import measure
from diptych.bench.request import BenchRequest, Reply
from tests.diptych.bench.scripted_http import ScriptedHttp, serving

REQUEST = BenchRequest((5, 6, 7), 6)
Endpoint = Literal["completions", "chat/completions"]
ENDPOINTS: list[Endpoint] = ["completions", "chat/completions"]


async def ran(script: ScriptedHttp, count: int, *, endpoint: Endpoint = "completions") -> Run:
    async with serving(script) as url:
        backend = OpenAIBackend(url, endpoint, Asking(timeout_s=20))
        try:
            return await drive(backend, Load(max_concurrency=2), [REQUEST] * count, seed=0)
        finally:
            await backend.close()


async def one(script: ScriptedHttp, request: BenchRequest, endpoint: Endpoint, asking: Asking) -> Reply:
    async with serving(script) as url:
        backend = OpenAIBackend(url + "/v1/", endpoint, asking, api_key="key")
        try:
            return await backend.send(request)
        finally:
            await backend.close()


def chat_event(delta: dict[str, str], why: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": why}]}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_measures_the_scripted_times(endpoint: Endpoint) -> None:
    run = await ran(ScriptedHttp(ttft=0.1, itl=0.03), 8, endpoint=endpoint)
    figures = measure(run, None, exact_lengths=True).figures
    assert figures["completed"] == 8
    assert figures["total_input_tokens"] == 88
    assert figures["total_cached_tokens"] == 16
    assert figures["total_output_tokens"] == 48
    assert figures["tokens_per_message"] == 1.0  # neither a chat's opening message nor the closing one counts
    assert 99 <= (figures["median_ttft_ms"] or 0) < 200
    assert 29 <= (figures["median_itl_ms"] or 0) < 60
    assert 249 <= (figures["median_e2el_ms"] or 0) < 500


async def test_counts_messages_where_the_server_gives_no_counts() -> None:
    figures = measure(await ran(ScriptedHttp(usage=False), 2), None, exact_lengths=True).figures
    assert figures["total_input_tokens"] == 6
    assert figures["total_output_tokens"] == 12


async def test_takes_tokens_without_text_as_output_that_came_with_the_end() -> None:
    [outcome] = (await ran(ScriptedHttp(ttft=0.05, text=False), 1)).outcomes
    assert outcome.reply is not None
    assert outcome.reply.output_tokens == 6
    assert len(outcome.reply.arrivals) == 1
    assert outcome.ttft >= 0.05


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thoughts_are_output_though_each_message_says_whose_turn_it_is(name: str) -> None:
    """As Ollama streams them."""
    turn = {"role": "assistant", "content": ""}
    said = [{**turn, name: "Hm"}, {**turn, name: "m."}, {**turn, "content": "Yes."}]
    script = ScriptedHttp(itl=0.01, events=[*map(chat_event, said), chat_event(turn, "stop")])
    reply = await one(script, REQUEST, "chat/completions", Asking())
    assert len(reply.arrivals) == 3
    assert reply.text == "Hmm.Yes."


async def test_counts_after_the_end_are_no_output_though_they_come_with_a_choice() -> None:
    """As LiteLLM sends them."""
    counts = {**chat_event({}), "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    answer = [chat_event({"content": "Ja"}), chat_event({"content": "."}), chat_event({}, "stop"), counts]
    reply = await one(ScriptedHttp(events=answer), REQUEST, "chat/completions", Asking())
    assert len(reply.arrivals) == reply.output_tokens == 2


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (ScriptedHttp(status=429), "HTTP 429"),
        (ScriptedHttp(status=502, page="défaut".encode("latin-1")), "HTTP 502"),
        (ScriptedHttp(vanish_after=3), "CONNECTION"),
        (ScriptedHttp(fail_after=3), "STREAM_ERROR"),
        (ScriptedHttp(fail_after=0), "STREAM_ERROR"),
        (ScriptedHttp(garbage_after=2), "BAD_STREAM"),
        (ScriptedHttp(text=False, usage=False), "NO_OUTPUT"),
    ],
)
async def test_counts_failures_by_code(script: ScriptedHttp, code: str) -> None:
    measured = measure(await ran(script, 3), None, exact_lengths=True)
    assert measured.errors == {code: 3}
    assert measured.figures["completed"] == 0


async def test_new_connections_reach_a_server_that_hangs_up_after_each_stream() -> None:
    async with serving(ScriptedHttp(hangs_up=True)) as url:
        backend = OpenAIBackend(url, "completions", Asking(model="m"), new_connections=True)
        run = await drive(backend, Load(max_concurrency=1), [REQUEST] * 4, seed=0)
        await backend.close()
    assert [one.error for one in run.outcomes] == [None] * 4


async def test_gives_up_at_its_time_limit() -> None:
    async with serving(ScriptedHttp(ttft=2)) as url:
        backend = OpenAIBackend(url, "completions", Asking(model="m", timeout_s=0.2))
        run = await drive(backend, Load(max_concurrency=1), [REQUEST], seed=0)
        await backend.close()
    assert measure(run, None, exact_lengths=True).errors == {"TIMEOUT": 1}


async def test_tells_of_output_while_it_comes() -> None:
    seen: list[float] = []
    reply = await one(ScriptedHttp(itl=0.01), REQUEST, "completions", Asking(on_output=seen.append))
    assert tuple(seen) == reply.arrivals


async def test_asks_completions_with_token_ids() -> None:
    script = ScriptedHttp()
    reply = await one(script, REQUEST, "completions", Asking(extra_body={"top_k": 1, "stream_options": None}))
    path, body = script.seen[-1]
    assert path == "/v1/completions"
    assert body == {
        "model": "scripted", "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0.0, "stream": True,
        "ignore_eos": True, "top_k": 1,
    }  # fmt: skip
    assert reply.text == " ä" * 6


async def test_asks_chats_with_words() -> None:
    script = ScriptedHttp()
    await one(script, BenchRequest((5, 6), 1), "chat/completions", Asking(model="m", ignore_eos=False))
    path, body = script.seen[-1]
    assert path == "/v1/chat/completions"
    [turn] = body["messages"]
    assert turn["role"] == "user"
    assert len(turn["content"].split()) == 2
    assert "ignore_eos" not in body


async def test_model_raises_unreachable_without_a_server() -> None:
    backend = OpenAIBackend("http://127.0.0.1:1", "completions", Asking())
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
        await backend.model()
    await backend.close()


async def test_port_that_speaks_no_http_1_is_told_apart() -> None:
    async def speak_http_2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x1e\x04\x00\x00\x00\x00\x00")  # a SETTINGS frame, as gRPC begins
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak_http_2, "127.0.0.1", 0) as server:
        backend = OpenAIBackend(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "completions", Asking()
        )
        with pytest.raises(Unreachable, match="is it a gRPC port"):
            await backend.model()
        await backend.close()


async def test_says_soon_that_a_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long an answer may take: nothing but a list is asked for."""
    monkeypatch.setattr(openai_http, "_LISTING", aiohttp.ClientTimeout(total=0.2))
    async with serving(ScriptedHttp(mute=True)) as url:
        backend = OpenAIBackend(url, "completions", Asking(timeout_s=20))
        with pytest.raises(Unreachable, match=r"no answer in 0\.2 s"):
            await asyncio.wait_for(backend.model(), 10)
        await backend.close()
