"""A prompt that its decode worker computes has the tokens of any other: local equals remote equals aggregated
equals transformers, through real processes, in fp32 on the native step, greedy and seeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from diptych.client import AsyncClient
from tests.end_to_end import reference
from tests.end_to_end.http_requests import collect
from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.test_aggregated_identity import aggregated, disaggregated
from tests.end_to_end.test_greedy_identity import check_identity

CHUNK = 23
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=["shared_memory", pytest.param("tcp", marks=pytest.mark.full)])
def local(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A system whose decode worker computes every prompt itself."""
    flags = ["--dtype", "fp32", "--transport", request.param, "--kv-blocks", "1000"]
    for flag in ("gateway.local-prefill=always", "decode.max-local-prefill-tokens=8192"):
        flags += ["--set", flag]
    with running_stack(*flags, "--set", f"decode.local-prefill-chunk={CHUNK}") as stack:
        asyncio.run(first(stack))
        yield stack
        stack.wait_idle()


async def first(stack: Stack) -> None:
    """Ask until a prompt is computed locally: the gateway has to have the decode worker's first report."""
    async with AsyncClient(stack.address) as client:
        for number in range(50):
            chunks = await collect(client, [5, 6, 7, number + 8], max_tokens=1)
            if chunks[-1].timings is not None and chunks[-1].timings.local_prefill:
                return
            await asyncio.sleep(0.1)
    raise AssertionError("no prompt was computed by the decode worker")


def remote_prompts(stack: Stack) -> float:
    return stack.metric("prefill", "diptych_engine_step_tokens_total")


def test_local_greedy_output_is_that_of_transformers(local: Stack) -> None:
    before = remote_prompts(local)
    prompts = reference.short_prompts()[::2]
    check_identity(local, prompts, "shared_memory")
    assert remote_prompts(local) == before, "a prefill worker took part"
    assert local.metric("decode", "diptych_local_prefills_total") >= len(prompts) + len(prompts[::3])


@pytest.mark.full
def test_local_seeded_output_is_that_of_one_process(local: Stack) -> None:
    before = remote_prompts(local)
    assert asyncio.run(disaggregated(local.address)) == aggregated()
    assert remote_prompts(local) == before


def test_suffix_is_local_and_the_prompt_remote_with_the_same_tokens(bundled: Stack) -> None:
    """By default; the prompt is long, and the second time nearly all of it is cached on the decode worker."""
    prompt = reference.prompts()[-4]

    async def ask() -> tuple[list[int], bool]:
        async with AsyncClient(bundled.address) as client:
            options = {"max_tokens": 8, "temperature": 0.0, "cache_salt": "local"}
            chunks = await collect(client, prompt, **options)
            assert chunks[-1].timings is not None
            ids = [token for chunk in chunks for token in chunk.token_ids]
            return ids, chunks[-1].timings.local_prefill

    asked = [asyncio.run(ask()) for _ in range(2)]
    assert [was_local for _, was_local in asked] == [False, True]
    assert asked[0][0] == asked[1][0]
    assert reference.is_greedy(prompt, reference.without_end(asked[0][0]), 8)
