"""Answers that take long to write out: as right as small ones, and others have their turn meanwhile."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from diptych.v1 import inference_pb2 as pb
from gateway.cooperative_yield import PORTION, Yielder
from gateway.frontends.openai.answer import BLOCK, Answer, blocks, ids_inside
from gateway.frontends.openai.chat_answer import ChatAnswer
from gateway.frontends.openai.chat_request import read_chat
from gateway.frontends.openai.completions_answer import CompletionsAnswer
from gateway.frontends.openai.completions_request import read_completions
from gateway.frontends.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_answers import CHAT, ENVELOPE, events, message, token
from tests.gateway.frontends.openai.test_answers import TOKENS as KNOWN
from tests.gateway.frontends.openai.test_routes import TEXT as SAID
from tests.gateway.frontends.openai.test_routes import gateway_api, post
from tests.gateway.loop_turns import turns_beside

TOKENS, ALTERNATIVES = 700, 20
RECORDS = TOKENS * (1 + ALTERNATIVES)
TEXT = "né" * TOKENS


def scored(first: str) -> list[pb.TokenLogprob]:
    """Of a text of ``TOKENS`` pieces; some alternatives are no text."""
    others = [token(str(i), -i) for i in range(ALTERNATIVES - 1)] + [token("\ufffd", -30, b"\xe2\x96")]
    return [token(first), *(token("né", -0.5, top=others) for _ in range(TOKENS - 1))]


def completion(**members: Any) -> Answer:
    asked = read_completions(
        {"model": "m", "prompt": TEXT, "echo": True, "logprobs": ALTERNATIVES, **members}
    )
    return CompletionsAnswer(asked, **ENVELOPE, **KNOWN)


def answered(choices: int) -> pb.GenerateResponse:
    outputs = [
        pb.OutputDelta(
            index=index,
            text="né!",
            logprobs=[token("né", -1), token("!", -2)],
            token_ids=[1, 2],
            finish_reason=pb.FINISH_REASON_LENGTH,
        )
        for index in range(choices)
    ]
    prompt = pb.PromptInfo(logprobs=scored("né"), token_ids=range(TOKENS))
    return message(*outputs, prompt=prompt, usage=pb.Usage(prompt_tokens=TOKENS))


async def test_a_whole_completion_with_its_prompt() -> None:
    sent = answered(2)
    answer = completion(n=2, return_token_ids=True)
    pieces, turns = await turns_beside(answer.whole("r", [sent]))
    choices = json.loads("".join(pieces))["choices"]
    for choice, output in zip(choices, sent.outputs, strict=True):
        everything = [*sent.prompt.logprobs, *output.logprobs]
        assert choice["logprobs"] == completion_logprobs(everything, TextOffsets())
        assert choice["text"] == f"{TEXT}né!"
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (list(range(TOKENS)), [1, 2])
    assert turns >= RECORDS // (2 * PORTION)
    # The prompt is written once and named twice.
    large = [piece for piece in pieces if len(piece) > 1000]
    assert len(large) == 2 * len({id(piece) for piece in large})


async def test_a_streamed_completion_with_its_prompt() -> None:
    sent = answered(3)
    answer = completion(n=3, stream=True)
    answer.begin("r")
    made, turns = await turns_beside(answer.events(0, sent))
    written = list(blocks(made))
    assert turns >= RECORDS // (2 * PORTION)
    assert all(block.startswith(b"data: ") and block.endswith(b"\n\n") for block in written)
    assert len(written) == 4  # each of the three large events, and the small ones together
    found = [event["choices"][0] for event in events(b"".join(written).decode())]
    assert [choice["index"] for choice in found] == [0, 1, 2, 0, 1, 2]
    offsets = TextOffsets()
    lists = completion_logprobs(sent.prompt.logprobs, offsets)
    assert [choice["logprobs"] for choice in found[:3]] == [lists] * 3
    after = completion_logprobs(sent.outputs[0].logprobs, offsets)
    assert [choice["logprobs"] for choice in found[3:]] == [after] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_with_logprobs(stream: bool) -> None:
    asked = read_chat({**CHAT, "logprobs": True, "top_logprobs": ALTERNATIVES, "stream": stream})
    answer = ChatAnswer(asked, **ENVELOPE)
    logprobs = scored("né")[1:]
    sent = message(pb.OutputDelta(text=TEXT, logprobs=logprobs, finish_reason=pb.FINISH_REASON_STOP))
    if stream:
        answer.begin("r")
        made, turns = await turns_beside(answer.events(0, sent))
        ((choice,),) = [event["choices"] for event in events(b"".join(blocks(made)).decode())]
    else:
        pieces, turns = await turns_beside(answer.whole("r", [sent]))
        (choice,) = json.loads("".join(pieces))["choices"]
    assert choice["logprobs"] == chat_logprobs(logprobs)
    assert turns >= RECORDS // (2 * PORTION)


async def test_many_token_ids_are_written_in_turns() -> None:
    ids = range(200_000)
    made, turns = await turns_beside(ids_inside(ids, Yielder()))
    assert json.loads(f"[{made}]") == list(ids)
    assert turns > 5
    assert await ids_inside([], Yielder()) == ""


def test_blocks_are_of_whole_events() -> None:
    sizes = [10, BLOCK, 10, 20, BLOCK - 30, 5]
    wholes = [["a" * (size - 1), "\n"] for size in sizes]
    found = list(blocks(wholes))
    assert [block.count(b"\n") for block in found] == [2, 3, 1]
    assert b"".join(found) == "".join(itertools.chain(*wholes)).encode()
    assert list(blocks([])) == []


async def test_a_large_answer_over_http(bundled: ServedModel, redis_url: str) -> None:
    """More than one block, with its length said ahead; and as events of prompts that are written at once."""
    prompts = [f"{number}{' ' * 2 * BLOCK}" for number in range(3)]
    body: Any = {"model": bundled.card.name, "prompt": prompts, "echo": True}
    async with gateway_api(bundled, redis_url) as (stack, client, _):
        status, answer, headers = await post(stack, "/v1/completions", body)
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert int(headers["Content-Length"]) > 6 * BLOCK
        stream = await client.completions.create(**body, stream=True)
        streamed = [""] * 3
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        await stack.until_idle()
    assert streamed == [choice["text"] for choice in answer["choices"]] == [p + SAID for p in prompts]
