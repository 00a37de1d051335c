"""Several prompts in one body: each is a request of its own to the core, and they are one to the client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from diptych.parameters import PARAMETERS
from gateway.frontends.openai.http_call import part_id
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_routes import TEXT, gateway_api, post
from tests.gateway.running_gateway import running


async def test_several_prompts_are_several_choices(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, client, decode):
        ids = bundled.tokenizer.encode("Three", add_special=True)
        asked: Any = {"model": bundled.card.name, "prompt": [ids, ids, ids]}
        whole = await client.completions.create(**asked, extra_headers={"x-request-id": "batch"})
        stream = await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        await stack.until_idle()
        assert len(await decode.wait_for("attach", 6)) == 6
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.text for choice in whole.choices] == [TEXT] * 3
    assert whole.id == "cmpl-batch"
    texts = ["", "", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [TEXT] * 3
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 3 * len(ids)


async def test_one_bad_prompt_of_several_is_named(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, client, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=bundled.card.name, prompt=["good", "", "good"])
        await stack.until_idle()
    assert refused.value.param == "prompt[1]"


async def test_the_longest_request_id_may_have_several_prompts(bundled: ServedModel, redis_url: str) -> None:
    longest = "r" * PARAMETERS["request_id"].longest
    body = {"model": bundled.card.name, "prompt": ["x"] * 11}
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        status, answer, headers = await post(stack, "/v1/completions", body, x_request_id=longest)
        assert (status, headers["x-request-id"]) == (200, longest)
        assert answer["id"] == f"cmpl-{longest}"
        assert len(answer["choices"]) == 11
        for foreign, name in ((f"{longest}r", longest), ("no spaces", "no_spaces")):
            status, answer, headers = await post(stack, "/v1/completions", body, x_request_id=foreign)
            assert (status, answer["id"], headers["x-request-id"]) == (200, f"cmpl-{name}", name)


def test_parts_of_requests_have_ids_of_their_own() -> None:
    long = "r" * (PARAMETERS["request_id"].longest - 1)
    ids = [part_id(request_id, prompt) for request_id in ("r", f"{long}1", f"{long}2") for prompt in (0, 127)]
    assert ids[:2] == ["r-0", "r-127"]
    assert len(set(ids)) == 6
    assert max(map(len, ids)) == PARAMETERS["request_id"].longest


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
async def test_a_refused_request_is_counted_once(
    bundled: ServedModel, redis_url: str, prompt: str | list[str]
) -> None:
    async with running(bundled, redis_url, worker_wait_timeout=0) as stack:
        body = {"model": bundled.card.name, "prompt": prompt}
        status, _, _ = await post(stack, "/v1/completions", body)
        assert status == 503
        refused = stack.registry.get_sample_value("diptych_rejections_total", {"reason": "NO_READY_WORKER"})
        assert refused == 1
