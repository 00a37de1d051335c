"""Inputs that OpenAI's API allows and real clients send, through real sockets."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response

from diptych.worker.v1 import work_pb2
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_routes import gateway_api, ids_of, post
from tests.gateway.scripted_workers import answering

ASKED: Any = {"role": "user", "content": "What time is it?"}
BROKEN = ['{"zone": "UT', "UTC", "[1]", '{"zone": NaN}', '{"zone": "\\ud800"}']


def _function_call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c1", "name": name, "arguments": arguments}


@pytest.mark.parametrize("arguments", BROKEN)
async def test_arguments_that_a_model_broke_off_are_history(
    bundled: ServedModel, redis_url: str, arguments: str
) -> None:
    """Send back what a call cut by its length, or a careless model, left: the model sees it as it was."""
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    history: Any = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "no JSON"},
    ]
    items: Any = [
        ASKED,
        _function_call("now", arguments),
        {"type": "function_call_output", "call_id": "c1", "output": "no JSON"},
    ]
    async with gateway_api(bundled, redis_url) as (_, client, decode):
        await client.chat.completions.create(model=bundled.card.name, messages=history)
        await client.responses.create(model=bundled.card.name, input=items)
        chat, responses = await decode.wait_for("attach", 2)
    assert chat.token_ids == responses.token_ids
    shown = bundled.tokenizer.decode(list(chat.token_ids), False)
    assert arguments in shown.replace('\\"', '"').replace("\\\\", "\\")


async def test_a_fault_in_an_item_has_the_items_name(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        for call, member in (
            (_function_call("now", "[" * 99), "arguments"),
            (_function_call("<", "{}"), "name"),
        ):
            body = {"model": bundled.card.name, "input": [ASKED, call]}
            status, answer, _ = await post(stack, "/v1/responses", body)
            assert (status, answer["error"]["param"]) == (400, f"input[1].{member}")


async def test_top_p_of_zero_keeps_one_token(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, client, decode):
        await client.completions.create(model=bundled.card.name, prompt="x", top_p=0, temperature=1)
        (attach,) = await decode.wait_for("attach", 1)
    assert 0.0 < attach.sampling.top_p < 1e-6


async def test_a_turn_whose_type_is_null_is_a_message(bundled: ServedModel, redis_url: str) -> None:
    """Send what a model_dump of openai-python's own easy message is; asked for beside it: what never is."""
    body = {"input": [{**ASKED, "type": None}], "include": ["web_search_call.action.sources"]}
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        status, answer, _ = await post(stack, "/v1/responses", {"model": bundled.card.name, **body})
    assert status == 200
    Response.model_validate(answer)


async def test_a_recursive_schema_is_a_grammar(bundled: ServedModel, redis_url: str) -> None:
    tree: Any = {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["children"],
        "additionalProperties": False,
    }
    ended = answering([*ids_of(bundled), min(bundled.card.eos_token_ids)])
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "tree", "strict": True, "schema": tree}}
    async with gateway_api(bundled, redis_url, ended) as (_, client, decode):
        await client.chat.completions.create(
            model=bundled.card.name, messages=[ASKED], response_format=wanted
        )
        (attach,) = await decode.wait_for("attach", 1)
    assert attach.sampling.grammar.kind == work_pb2.Grammar.KIND_JSON_SCHEMA
