"""Hostile bodies: each is answered with 400 or a status of its own, and the error names the field."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.parameters import PARAMETERS
from diptych.runtime.errors import DiptychError, InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.frontends.openai.chat_request import read_chat
from gateway.frontends.openai.completions_request import read_completions
from gateway.model.served_model import ServedModel
from gateway.request.json_values import parse_body
from tests.gateway.frontends.openai.test_routes import gateway_api, post, root

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object"}


def image_turn(url: str, **members: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url, **members}}
    return {"role": "user", "content": [{"type": "text", "text": "What?"}, image]}


BAD_BYTES: list[tuple[bytes, str]] = [
    (b"", "body"),
    (b"{", "body"),
    (b"[]", "body"),
    (b"null", "body"),
    (b'"text"', "body"),
    (b"\xff\xfe", "body"),
    ('{"model": "m"}'.encode("utf-16"), "body"),
    (b"\xef\xbb\xbf{}", "body"),
    (b'{"temperature": NaN}', "body"),
    (b'{"temperature": -Infinity}', "body"),
    (b'{"max_tokens": ' + b"9" * 5000 + b"}", "body"),
    (b"[" * 200_000, "body"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "body"),
    (b'{"model": "a\nb"}', "body"),
]

# Each replaces members of a good body; the error names the last column.
BAD_MEMBERS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"model": None}, "model"),
    (COMPLETIONS, {"model": 3}, "model"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": {}}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, -1]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, 10**30]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, 4_000_000_000]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, "x"]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["x", 1]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[1], ["x"]]}, "prompt[1][0]"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * (limits.MAX_PROMPTS + 1)}, "prompt"),
    (COMPLETIONS, {"prompt": ["x", "y"], "request_id": "r"}, "request_id"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": "7"}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 10**100}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"temperature": -1}, "temperature"),
    (COMPLETIONS, {"temperature": 10**400}, "temperature"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"temperature": [1]}, "temperature"),
    (COMPLETIONS, {"top_p": -0.1}, "top_p"),
    (COMPLETIONS, {"top_p": 1.1}, "top_p"),
    (COMPLETIONS, {"top_k": -2}, "top_k"),
    (COMPLETIONS, {"top_k": 2**40}, "top_k"),
    (COMPLETIONS, {"min_p": 2}, "min_p"),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"frequency_penalty": 3}, "frequency_penalty"),
    (COMPLETIONS, {"seed": 2**63}, "seed"),
    (COMPLETIONS, {"n": 0}, "n"),
    (COMPLETIONS, {"n": 5_000_000}, "n"),
    (COMPLETIONS, {"stop": [""]}, "stop[0]"),
    (COMPLETIONS, {"stop": ["x"] * (PARAMETERS["stop"].most + 1)}, "stop"),
    (COMPLETIONS, {"stop": ["x"] * 100_000}, "stop"),
    (COMPLETIONS, {"stop": 3}, "stop"),
    (COMPLETIONS, {"stop": ["a", 3]}, "stop[1]"),
    (COMPLETIONS, {"stop": ".", "use_beam_search": True, "n": 2}, "stop"),
    (COMPLETIONS, {"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    (COMPLETIONS, {"stop_token_ids": [10**9]}, "stop_token_ids[0]"),
    (COMPLETIONS, {"logit_bias": [1]}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"²": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"9999999999": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1": "x"}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(limits.MAX_JSON_LIST + 1)}}, "logit_bias"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"logprobs": 10**9}, "logprobs"),
    (COMPLETIONS, {"echo": "yes"}, "echo"),
    (COMPLETIONS, {"suffix": "s"}, "suffix"),
    (COMPLETIONS, {"stream": 1}, "stream"),
    (COMPLETIONS, {"stream_options": {}}, "stream_options"),
    (
        COMPLETIONS,
        {"stream": True, "stream_options": {"continuous_usage_stats": "yes"}},
        "stream_options.continuous_usage_stats",
    ),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (COMPLETIONS, {"cache_salt": "a\x00b"}, "cache_salt"),
    (COMPLETIONS, {"cache_salt": "s" * 1_000_000}, "cache_salt"),
    (COMPLETIONS, {"prompt_cache_key": "k" * 1000}, "prompt_cache_key"),
    (COMPLETIONS, {"priority": 2**31}, "priority"),
    (COMPLETIONS, {"request_id": "a b"}, "request_id"),
    (COMPLETIONS, {"frequency_penalti": 1}, "frequency_penalti"),
    (COMPLETIONS, {"guided_json": 3}, "guided_json"),
    (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    (COMPLETIONS, {"structured_outputs": {"other": 1}}, "structured_outputs.other"),
    (COMPLETIONS, {"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    (COMPLETIONS, {"guided_choice": []}, "guided_choice"),
    (COMPLETIONS, {"guided_choice": ["a", ""]}, "guided_choice[1]"),
    (COMPLETIONS, {"guided_choice": ["a", "\ud800"]}, "guided_choice[1]"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": ["x"]}, "messages[0]"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "god", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [*USER, {"role": "user", "content": None}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "system"}, *USER]}, "messages[0].content"),
    (CHAT, {"messages": [*USER, {"role": "tool", "tool_call_id": "1"}]}, "messages[1].content"),
    (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": []}]}, "messages[1].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
    ),
    (CHAT, {"messages": [image_turn("ftp://example.org/a.png")]}, "messages[0].content[1].image_url.url"),
    (CHAT, {"messages": [image_turn("data:image/png,abc")]}, "messages[0].content[1].image_url.url"),
    (CHAT, {"messages": [image_turn("data:image/png;base64,?")]}, "messages[0].content[1].image_url.url"),
    (
        CHAT,
        {"messages": [image_turn("data:image/png;base64,AAAA", detail="low")]},
        "messages[0].content[1].image_url.detail",
    ),
    # A model of text.
    (
        CHAT,
        {"messages": [image_turn("data:image/png;base64,AAAA")]},
        "messages[0].content[1].image_url",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
        "messages[0].content[0].refusal",
    ),
    (CHAT, {"messages": USER * (limits.MAX_MESSAGES + 1)}, "messages"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens"),
    (COMPLETIONS, {"prompt": ["a", "b", "c " * 9000]}, "prompt[2]"),
    (CHAT, {"logprobs": 3}, "logprobs"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    # Members that have a field of the core for a namesake.
    (CHAT, {"session_id": "a"}, "session_id"),
    (CHAT, {"text": "a"}, "text"),
    (COMPLETIONS, {"request": {}}, "request"),
    (COMPLETIONS, {"token_ids": [1]}, "token_ids"),
    (COMPLETIONS, {"sampling": {}}, "sampling"),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    (CHAT, {"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "response_format.schema"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
    ),
    (CHAT, {"response_format": {"type": "text"}, "guided_json": 1}, "guided_json"),
    (CHAT, {"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (CHAT, {"tool_choice": "perhaps"}, "tool_choice"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"function_call": {"name": "f"}}, "function_call"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"detokenize": False}, "detokenize"),
    (COMPLETIONS, {"length_penalty": 0.5}, "length_penalty"),
    (COMPLETIONS, {"prompt_logprobs": 2}, "prompt_logprobs"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"chat_template_kwargs": {"secret": 1}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"x": "\ud800"}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"x": 10**400}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"x": json.loads("[" * 40 + "]" * 40)}}, "chat_template_kwargs"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"prompt": "x"}, "prompt"),
]


# Each goes into a good body, and is answered as if it were not there.
NOTHING_ASKED: list[tuple[str, dict[str, Any]]] = [
    *((path, {name: value}) for path in (COMPLETIONS, CHAT) for name, value in (
        ("detokenize", True), ("length_penalty", 1.0), ("length_penalty", 1), ("prompt_logprobs", 0),
        ("spaces_between_special_tokens", True), ("early_stopping", False), ("logits_processors", []),
        ("return_tokens_as_token_ids", False), ("kv_transfer_params", {}), ("vllm_xargs", {}),
        ("cache_prompt", True), ("typical_p", 1), ("lora_path", None),
    )),
    *((CHAT, {name: value}) for name, value in (
        ("function_call", "none"), ("functions", []), ("verbosity", "medium"), ("reasoning_effort", "none"),
        ("reasoning_effort", "minimal"), ("include_reasoning", True),
        ("include_reasoning", False), ("documents", []), ("think", False),
        ("thinking", {"type": "disabled"}), ("reasoning", {"effort": "none"}), ("mm_processor_kwargs", {}),
        ("chat_template_kwargs", {}), ("chat_template_kwargs", {"enable_thinking": False}), ("tools", []),
        ("modalities", ["text"]), ("tool_choice", "none"), ("parallel_tool_calls", True),
    )),
]  # fmt: skip


def good(path: str, model: str) -> dict[str, Any]:
    return {"model": model, **({"prompt": "x"} if path == COMPLETIONS else {"messages": USER})}


async def test_bad_bodies_are_answered_with_400_and_the_member(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        for data, param in BAD_BYTES:
            status, answer, _ = await post(stack, COMPLETIONS, data)
            assert (status, answer["error"]["param"]) == (400, param), data[:40]
        for path, members, param in BAD_MEMBERS:
            status, answer, _ = await post(stack, path, {**good(path, bundled.card.name), **members})
            error = answer["error"]
            assert (status, error["param"]) == (400, param), (members, error)
            assert error["type"] == "invalid_request_error"
            assert len(error["message"]) < 1024
            assert set(error) == {"message", "type", "param", "code"}
        status, answer, _ = await post(stack, COMPLETIONS, {"model": "../etc", "prompt": "x"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        await stack.until_idle()
        assert (await post(stack, COMPLETIONS, good(COMPLETIONS, bundled.card.name)))[0] == 200


async def test_members_that_ask_for_nothing_are_accepted(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        for path, members in NOTHING_ASKED:
            status, answer, _ = await post(stack, path, {**good(path, bundled.card.name), **members})
            assert status == 200, (members, answer)


# What clients keep of earlier answers, and put into the next request.
KEPT_TURNS: list[dict[str, Any]] = [
    {"content": "Hi", "id": "msg_1", "annotations": [{"type": "url_citation"}], "refusal": None},
    {"content": "Hi", "parsed": {"a": 1}, "provider_specific_fields": {"x": None}, "cache_control": {}},
    {"content": "Hi", "reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
    {"content": "Hi", "reasoning_content": {"not": "text"}, "function_call": None, "audio": None},
    {"content": None, "refusal": "I will not."},
    {"content": None, "reasoning_content": "hm"},
    {"content": [{"type": "refusal", "refusal": "I will not."}]},
    {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "Hi"}]},
    {"content": [{"type": "redacted_thinking", "data": "d"}, {"type": "text", "text": "Hi"}]},
    {"content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "annotations": []}]},
]


async def test_history_with_members_of_clients_is_accepted(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        for kept in KEPT_TURNS:
            messages = [*USER, {"role": "assistant", **kept}, *USER]
            status, answer, _ = await post(stack, CHAT, {"model": bundled.card.name, "messages": messages})
            assert status == 200, (kept, answer)


def test_unknown_members_of_turns_and_tools_are_ignored() -> None:
    call = {"id": "1", "index": 0, "type": "function", "extra_content": {}, "parsed_arguments": {}}
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    turn = {"role": "assistant", "tool_calls": [{**call, "function": function}], "parsed": None}
    tool = {"type": "function", "cache_control": {}, "function": {"name": "f", "strict": True, "x": 1}}
    chosen = {"type": "function", "x": 1, "function": {"name": "f", "x": 1}}
    members = {"model": "m", "messages": [turn], "tools": [tool], "tool_choice": chosen}
    chat = read_chat(members).builders[0].request.chat
    assert chat.messages[0].tool_calls[0] == pb.ToolCall(id="1", name="f", arguments_json="{}")
    assert (chat.tools[0].name, chat.tool_choice.name) == ("f", "f")


@pytest.mark.parametrize(
    "kept",
    [
        {"reasoning_content": "hm", "content": "Hi"},
        {"reasoning": "hm", "content": "Hi"},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hi"}]},
    ],
)
def test_thoughts_go_to_the_template(kept: dict[str, Any]) -> None:
    chat = read_chat({"model": "m", "messages": [{"role": "assistant", **kept}]}).builders[0].request.chat
    assert chat.messages[0] == pb.ChatMessage(role="assistant", content="Hi", reasoning_content="hm")


@pytest.mark.parametrize(
    ("separator", "most"), [(b",", limits.MAX_JSON_COMMAS), (b":", limits.MAX_JSON_COLONS)]
)
def test_parse_body_refuses_too_many_elements(separator: bytes, most: int) -> None:
    body = b'{"a": "' + separator * (most - separator.count(b":")) + b'"}'
    assert len(parse_body(body)) == 1
    with pytest.raises(InvalidParameter, match="too many elements"):
        parse_body(body.replace(b'"}', separator + b'"}'))


async def test_other_paths_methods_and_types_are_refused(bundled: ServedModel, redis_url: str) -> None:
    async with (
        gateway_api(bundled, redis_url) as (stack, _, _),
        aiohttp.ClientSession(root(stack)) as session,
    ):

        async def status(method: str, path: str, **more: Any) -> tuple[int, str]:
            async with session.request(method, path, **more) as answer:
                return answer.status, (await answer.json())["error"]["code"]

        json_type = {"Content-Type": "application/json"}
        assert await status("POST", "/v1/embeddings", json={}) == (400, "unsupported_feature")
        assert await status("POST", "/v1/nothing", json={}) == (404, "unknown_path")
        assert await status("GET", "/", json={}) == (404, "unknown_path")
        assert await status("GET", COMPLETIONS) == (405, "method_not_allowed")
        assert await status("POST", "/v1/models", json={}) == (405, "method_not_allowed")
        assert await status("POST", COMPLETIONS, data=b"{}") == (415, "not_json")
        form = {"Content-Type": "text/plain"}
        assert await status("POST", COMPLETIONS, data=b"{}", headers=form) == (415, "not_json")
        zipped = {**json_type, "Content-Encoding": "gzip"}
        assert await status("POST", COMPLETIONS, data=b"{}", headers=zipped) == (415, "compressed_body")
        large = b'{"model": "' + b"x" * limits.MAX_BODY_BYTES + b'"}'
        assert await status("POST", COMPLETIONS, data=io.BytesIO(large), headers=json_type) == (
            413,
            "body_too_large",
        )

        async def pieces() -> Any:  # chunked: the length is not known ahead
            for _ in range(limits.MAX_BODY_BYTES // 65536 + 2):
                yield b"x" * 65536

        assert await status("POST", COMPLETIONS, data=pieces(), headers=json_type) == (413, "body_too_large")
        exact = json.dumps(good(COMPLETIONS, bundled.card.name)).encode()
        exact += b" " * (limits.MAX_BODY_BYTES - len(exact))
        async with session.post(COMPLETIONS, data=io.BytesIO(exact), headers=json_type) as answer:
            assert answer.status == 200


async def test_expect_continue_is_answered(bundled: ServedModel, redis_url: str) -> None:
    async with (
        gateway_api(bundled, redis_url) as (stack, _, _),
        aiohttp.ClientSession(root(stack)) as session,
    ):
        body = good(COMPLETIONS, bundled.card.name)
        async with session.post(COMPLETIONS, json=body, expect100=True) as answer:
            assert answer.status == 200


async def test_malformed_http_is_answered_with_400(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for data, expected in (
            (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),  # TLS
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"40"),  # HTTP/2 without agreement
            (head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
            (head + b"Content-Length: -1\r\n\r\n", b"400"),
            (head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        ):
            assert expected in (await first_line(stack.gateway.http_port, data))[:16], data
        status, _, _ = await post(stack, COMPLETIONS, good(COMPLETIONS, bundled.card.name))
        assert status == 200


async def first_line(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    writer.write(data)
    line = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    return line


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
names = st.sampled_from(
    sorted(
        {name for _, members, _ in BAD_MEMBERS for name in members}
        | {"user", "metadata", "parallel_tool_calls"}
    )
)


@given(st.dictionaries(names | st.text(max_size=5), values, max_size=6), st.booleans())
def test_any_members_are_a_request_or_an_error(members: dict[str, Any], chat: bool) -> None:
    whole = {"model": "m", "prompt": "x", "messages": USER}
    whole.pop("prompt" if chat else "messages")
    asked = None
    try:
        asked = (read_chat if chat else read_completions)({**whole, **members})
    except DiptychError as error:
        refused = error.violations
    else:
        refused = ()
        for builder in asked.builders:
            assert pb.GenerateRequest.FromString(builder.request.SerializeToString()) == builder.request
    assert bool(refused) is (asked is None)


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_members_or_an_error(data: bytes) -> None:
    found: object = None
    try:
        found = parse_body(data)
    except InvalidParameter as error:
        found = {violation.field: "" for violation in error.violations}
        assert set(found) == {"body"}
    assert isinstance(found, dict)


def test_parse_body_allows_longer_lists_of_numbers() -> None:
    body = b'{"prompt": [' + b"7,\n" * limits.MAX_JSON_NUMBERS + b"7]}"
    assert len(parse_body(body)["prompt"]) == limits.MAX_JSON_NUMBERS + 1  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="too many elements"):
        parse_body(body.replace(b"7]", b"7,7]"))
