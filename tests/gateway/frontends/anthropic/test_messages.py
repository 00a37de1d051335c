"""`/v1/messages` over real sockets: bodies, blocks, events and errors in Anthropic's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.errors import DiptychError
from diptych.v1 import inference_pb2 as pb
from gateway.access.access import DEFAULT_TENANT
from gateway.access.key_file import digest_of
from gateway.frontends.anthropic.messages_answer import MessagesAnswer, _Blocks
from gateway.frontends.anthropic.messages_request import read_messages
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_routes import TEXT, gateway_api, ids_of, post, root
from tests.gateway.running_gateway import Stack
from tests.gateway.scripted_workers import ScriptedDecode, answering

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Count:"}
TOOL = {"name": "now", "description": "Time.", "input_schema": {"type": "object", "properties": {}}}
URL_SOURCE = {"type": "url", "url": "https://127.0.0.1/a.png"}
DATA_SOURCE = {"type": "base64", "media_type": "image/png", "data": "aW1hZ2U="}
Event = dict[str, Any]


def body(model: ServedModel, **members: Any) -> dict[str, Any]:
    return {"model": model.card.name, "max_tokens": 64, "messages": [USER], **members}


async def events_of(stack: Stack, members: dict[str, Any], **headers: str) -> tuple[list[Event], Any]:
    """Return the events of a stream, each checked against its name, and the head's headers."""
    sent = {"Content-Type": "application/json", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{root(stack)}{MESSAGES}", json={**members, "stream": True}, headers=sent) as answer,
    ):
        written = [block.split("\n") for block in (await answer.text()).split("\n\n") if "data: " in block]
        head = answer.headers
    events = [json.loads(data.removeprefix("data: ")) for _, data in written]
    assert [name.removeprefix("event: ") for name, _ in written] == [event["type"] for event in events]
    return events, head


async def test_text_is_answered_whole(bundled: ServedModel, redis_url: str) -> None:
    ended = answering([*ids_of(bundled), min(bundled.card.eos_token_ids)])
    async with gateway_api(bundled, redis_url, ended) as (stack, _, decode):
        asked = body(bundled, system=[{"type": "text", "text": "Be brief.", "cache_control": {}}])
        status, answer, headers = await post(stack, MESSAGES, asked)
        (attach,) = await decode.wait_for("attach", 1)
    prompt = bundled.tokenizer.decode(list(attach.token_ids), False)
    assert "Be brief." in prompt
    assert (status, answer["type"], answer["role"]) == (200, "message", "assistant")
    assert answer["id"] == f"msg_{headers['request-id']}"
    assert headers["request-id"] == headers["x-request-id"]
    assert answer["content"] == [{"type": "text", "text": TEXT}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(attach.token_ids)
    assert usage["output_tokens"] == len(ids_of(bundled)) + 1


async def test_stream_has_the_blocks_of_the_whole_answer(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        _, whole, _ = await post(stack, MESSAGES, body(bundled))
        events, head = await events_of(stack, body(bundled))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0]["message"]["id"] == f"msg_{head['request-id']}"
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 0
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == TEXT
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2]["usage"] == whole["usage"]


async def test_stop_sequence_is_named(bundled: ServedModel, redis_url: str) -> None:
    asked = body(bundled, stop_sequences=[" four"])
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        _, whole, _ = await post(stack, MESSAGES, asked)
        events, _ = await events_of(stack, asked)
    ending = {"stop_reason": "stop_sequence", "stop_sequence": " four"}
    assert whole["content"][0]["text"] == " One two three"
    assert {name: whole[name] for name in ending} == events[-2]["delta"] == ending


async def test_fault_after_the_first_event_is_an_error_event(bundled: ServedModel, redis_url: str) -> None:
    async def stuck(decode: ScriptedDecode, work: Any) -> None:
        decode.tokens(work, 0, ids_of(bundled)[:2])

    async with gateway_api(bundled, redis_url, stuck) as (stack, _, _):
        events, _ = await events_of(stack, body(bundled), **{"x-request-timeout-ms": "2000"})
    assert events[0]["type"] == "message_start"
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "timeout_error")


async def test_count_is_that_of_the_request(bundled: ServedModel, redis_url: str) -> None:
    asked = {"model": bundled.card.name, "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        _, counted, _ = await post(stack, COUNT, asked)
        _, plain, _ = await post(stack, COUNT, {**asked, "tools": []})
        _, answer, _ = await post(stack, MESSAGES, {**asked, "max_tokens": 64})
        status, fault, _ = await post(stack, COUNT, {**asked, "messages": []})
    usage = answer["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert plain["input_tokens"] < counted["input_tokens"]
    assert (status, fault["error"]["type"]) == (400, "invalid_request_error")
    assert "messages" in fault["error"]["message"]


@pytest.mark.parametrize(
    ("members", "named"),
    [
        pytest.param({"max_tokens": None}, "max_tokens: is required", id="no-limit"),
        pytest.param({"max_tokens": 0}, "max_tokens:", id="limit"),
        pytest.param({"messages": []}, "messages:", id="no-turn"),
        pytest.param({"messages": [{"role": "cook", "content": "x"}]}, "messages[0].role:", id="role"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type:",
            id="image-without-source",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
            "messages[0].content[0].source.url:",
            id="image-without-url",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image", "source": URL_SOURCE}]}]},
            "messages[0].content[0].source:",
            id="image-by-url-for-a-model-of-text",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {**DATA_SOURCE, "data": "§"}}]}
                ]
            },
            "messages[0].content[0].source.data:",
            id="image-no-base64",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image", "source": DATA_SOURCE}]}]},
            "messages[0].content[0].source:",
            id="image-for-a-model-of-text",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
                ]
            },
            "messages[0].content[0]:",
            id="call-of-the-user",
        ),
        pytest.param(
            {"messages": [USER, {"role": "assistant", "content": "1"}]}, "messages[1].role:", id="prefill"
        ),
        pytest.param(
            {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type:", id="server-tool"
        ),
        pytest.param({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name:", id="tool-name"),
        pytest.param({"tool_choice": {"type": "some"}}, "tool_choice.type:", id="choice"),
        pytest.param({"thinking": {"type": "loud"}}, "thinking.type:", id="thinking"),
        pytest.param({"thinking": {"type": "enabled"}}, "thinking.type:", id="no-thinking-here"),
        pytest.param(
            {"output_config": {"format": {"type": "xml", "schema": {}}}},
            "output_config.format.type:",
            id="form",
        ),
        pytest.param({"temperature": -1}, "temperature:", id="temperature"),
        pytest.param({"n": 2}, "n:", id="choices"),
        pytest.param({"unheard_of": 1}, "unheard_of:", id="unknown"),
    ],
)
async def test_fault_names_the_clients_member(
    bundled: ServedModel, redis_url: str, members: dict[str, Any], named: str
) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        status, answer, _ = await post(stack, MESSAGES, body(bundled, **members))
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert answer["error"]["message"].startswith(named)


async def test_errors_of_the_http_port_have_anthropics_shape(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        unknown = await post(stack, MESSAGES, {**body(bundled), "model": "other"})
        no_json = await post(stack, MESSAGES, b"{", x_request_id="mine")
        long = await post(
            stack, MESSAGES, body(bundled, messages=[{"role": "user", "content": "word " * 20_000}])
        )
    assert (unknown[0], unknown[1]["error"]["type"]) == (404, "not_found_error")
    assert (no_json[0], no_json[1]["request_id"], no_json[2]["request-id"]) == (400, "mine", "mine")
    assert "prompt is too long" in long[1]["error"]["message"]


async def test_key_is_taken_from_x_api_key(bundled: ServedModel, redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text(json.dumps({"name": "one", "sha256": digest_of("k-1").hex(), "tenant": "t"}) + "\n")
    file.chmod(0o600)
    async with gateway_api(bundled, redis_url, api_keys_file=file) as (stack, _, _):
        known = await post(stack, MESSAGES, body(bundled), x_api_key="k-1")
        bearer = await post(stack, MESSAGES, body(bundled), authorization="Bearer k-1")
        stranger = await post(stack, MESSAGES, body(bundled), x_api_key="k-2")
        nothing = await post(stack, MESSAGES, body(bundled))
    assert DEFAULT_TENANT != "t"
    assert [one[0] for one in (known, bearer, stranger, nothing)] == [200, 200, 401, 401]
    assert stranger[1]["error"]["type"] == "authentication_error"


def turns_of(messages: list[dict[str, Any]], **members: Any) -> pb.ChatPrompt:
    asked = read_messages({"model": "m", "max_tokens": 9, "messages": messages, **members})
    return asked.builders[0].request.chat


def test_blocks_become_turns_in_their_order() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "now", "input": {"zone": "CET", "é": [1, None]}}
    result = {"type": "tool_result", "tool_use_id": "c1"}
    chat = turns_of(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "c"},
                    call,
                    {**call, "id": "c2"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {**result, "content": "1", "is_error": True},
                    {**result, "tool_use_id": "c2", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        system="s",
    )
    shape = [(turn.role, turn.content, turn.tool_call_id) for turn in chat.messages]
    assert shape == [
        ("system", "s", ""),
        ("user", "ab", ""),
        ("assistant", "c", ""),
        ("tool", "1", "c1"),
        ("tool", "2", "c2"),
        ("user", "and?", ""),
    ]
    own = chat.messages[2]
    assert own.reasoning_content == "r"
    assert [called.id for called in own.tool_calls] == ["c1", "c2"]
    assert json.loads(own.tool_calls[0].arguments_json) == call["input"]


def test_tools_thinking_and_form_reach_the_core() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    asked = read_messages(
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "now", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive", "display": "omitted"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
            "top_k": 3,
            "seed": 5,
            "metadata": {"user_id": "u"},
        }
    )
    request = asked.builders[0].request
    choice = request.chat.tool_choice
    assert (choice.mode, choice.name, choice.parallel) == (pb.ToolChoice.MODE_NAMED, "now", False)
    assert json.loads(request.chat.tools[0].parameters_json_schema) == TOOL["input_schema"]
    assert json.loads(request.structured_output.json_schema) == schema
    assert dict(request.chat.template_kwargs.items()) == {"enable_thinking": True, "reasoning_effort": "low"}
    assert (request.sampling.top_k, request.sampling.seed, asked.reasoning) == (3, 5, False)
    any_tool = turns_of([USER], tools=[TOOL], tool_choice={"type": "any"})
    assert any_tool.tool_choice.mode == pb.ToolChoice.MODE_REQUIRED
    with pytest.raises(DiptychError):
        turns_of([USER], tools=[TOOL], tool_choice={"type": "tool"})


PIECES = st.lists(
    st.one_of(
        st.builds(lambda text: {"text": text}, st.text(min_size=1, max_size=5)),
        st.builds(lambda text: {"reasoning_content": text}, st.text(min_size=1, max_size=5)),
        st.builds(
            lambda number, value: {
                "tool_calls": [
                    pb.ToolCall(id=f"c{number}", name="f", arguments_json='{"v": '),
                    pb.ToolCall(arguments_json=f"{json.dumps(value)}}}"),
                ]
            },
            st.integers(0, 99),
            st.text(max_size=5),
        ),
    ),
    min_size=1,
    max_size=12,
)


@given(PIECES)
def test_events_of_any_pieces_build_the_complete_blocks(pieces: list[dict[str, Any]]) -> None:
    blocks, built = _Blocks(thinking=True), list[dict[str, Any]]()
    outputs = [pb.OutputDelta(**piece) for piece in pieces]
    outputs.append(pb.OutputDelta(finish_reason=pb.FINISH_REASON_STOP))
    for output in outputs:
        for event in blocks.add(output):
            apply(event, built)
    assert [{**block, "json": None} for block in built] == [
        {**block, "json": None} for block in blocks.complete
    ]
    hidden = _Blocks(thinking=False)
    for output in outputs:
        hidden.add(output)
    assert all(block["type"] != "thinking" for block in hidden.complete)


def apply(event: Event, built: list[dict[str, Any]]) -> None:
    """Do what a client does: each block is whole before the next begins."""
    if event["type"] == "content_block_start":
        assert event["index"] == len(built)
        built.append({**event["content_block"], "json": ""})
        return
    assert event["index"] == len(built) - 1
    block, delta = built[-1], event.get("delta", {})
    if event["type"] == "content_block_stop":
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    elif delta["type"] == "input_json_delta":
        block["json"] += delta["partial_json"]
    elif delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        block[block["type"]] += delta[block["type"]]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ({"finish_reason": pb.FINISH_REASON_STOP}, "end_turn"),
        ({"finish_reason": pb.FINISH_REASON_STOP, "stop_text": "x"}, "stop_sequence"),
        ({"finish_reason": pb.FINISH_REASON_LENGTH}, "max_tokens"),
        ({"finish_reason": pb.FINISH_REASON_TIME_LIMIT}, "max_tokens"),
        ({"finish_reason": pb.FINISH_REASON_REPETITION}, "max_tokens"),
        (
            {
                "finish_reason": pb.FINISH_REASON_TOOL_CALLS,
                "tool_calls": [pb.ToolCall(id="c", name="f", arguments_json="{}")],
            },
            "tool_use",
        ),
    ],
)
async def test_reason_of_the_end_is_anthropics(output: dict[str, Any], reason: str) -> None:
    asked = read_messages({"model": "m", "max_tokens": 9, "messages": [USER]})
    answer = MessagesAnswer(asked, model="m", created=0)
    (whole,) = await answer.whole("r", [pb.GenerateResponse(outputs=[pb.OutputDelta(**output)])])
    assert json.loads(whole)["stop_reason"] == reason


async def test_call_that_was_cut_has_an_empty_input() -> None:
    asked = read_messages({"model": "m", "max_tokens": 9, "messages": [USER]})
    cut = pb.ToolCall(id="c", name="f", arguments_json='{"zone": "C')
    output = pb.OutputDelta(finish_reason=pb.FINISH_REASON_LENGTH, tool_calls=[cut])
    (whole,) = await MessagesAnswer(asked, model="m", created=0).whole(
        "r", [pb.GenerateResponse(outputs=[output])]
    )
    assert json.loads(whole)["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
