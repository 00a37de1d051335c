"""`/tokenize` and `/detokenize` over real sockets, in vLLM's forms."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_routes import gateway_api, post

TURNS = [{"role": "user", "content": "Hi, Zoë!"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


async def test_text_and_its_tokens_are_told(bundled: ServedModel, redis_url: str) -> None:
    text = "Zoë counts: 1, 2, 3"
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        status, found, _ = await post(stack, "/tokenize", {"prompt": text, "return_token_strs": True})
        _, plain, _ = await post(stack, "/tokenize", {"model": bundled.card.name, "prompt": text})
        _, back, _ = await post(stack, "/detokenize", {"tokens": found["tokens"]})
        _, end, _ = await post(stack, "/detokenize", {"tokens": [min(bundled.card.eos_token_ids)]})
    ids = bundled.tokenizer.encode(text, add_special=True)
    assert (status, found["tokens"], found["count"]) == (200, ids, len(ids))
    assert found["max_model_len"] == bundled.card.max_context
    assert found["token_strs"] == [bundled.tokenizer.token_text(token_id) for token_id in ids]
    assert (plain["tokens"], plain["token_strs"]) == (ids, None)
    assert back == {"prompt": text}
    assert end["prompt"].startswith("<|")  # control tokens are shown


async def test_conversation_has_the_tokens_of_its_chat(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, decode):
        _, found, _ = await post(stack, "/tokenize", {"messages": TURNS, "tools": [TOOL]})
        _, bare, _ = await post(stack, "/tokenize", {"messages": TURNS, "add_generation_prompt": False})
        asked = {"model": bundled.card.name, "messages": TURNS, "tools": [TOOL], "max_tokens": 1}
        await post(stack, "/v1/chat/completions", asked)
        (attach,) = await decode.wait_for("attach", 1)
    assert found["tokens"] == list(attach.token_ids)
    assert bare["count"] < found["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        pytest.param("/tokenize", {}, "prompt", id="nothing"),
        pytest.param("/tokenize", {"prompt": ""}, "prompt", id="empty"),
        pytest.param("/tokenize", {"prompt": "x", "messages": TURNS}, "prompt", id="both"),
        pytest.param(
            "/tokenize", {"messages": [{"role": "x", "content": "y"}]}, "messages[0].role", id="role"
        ),
        pytest.param(
            "/tokenize", {"messages": TURNS, "add_special_tokens": True}, "add_special_tokens", id="special"
        ),
        pytest.param("/tokenize", {"prompt": "x", "more": 1}, "more", id="unknown"),
        pytest.param("/detokenize", {}, "tokens", id="no-tokens"),
        pytest.param("/detokenize", {"tokens": [-1]}, "tokens[0]", id="negative"),
        pytest.param("/detokenize", {"tokens": [1 << 30]}, "tokens[0]", id="beyond"),
    ],
)
async def test_fault_names_the_member(
    bundled: ServedModel, redis_url: str, path: str, body: dict[str, Any], param: str
) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        status, answer, _ = await post(stack, path, body)
        other, _, _ = await post(stack, path, {**body, "prompt": "x", "tokens": [1], "model": "other"})
    assert (status, answer["error"]["param"]) == (400, param)
    assert other in (400, 404)
