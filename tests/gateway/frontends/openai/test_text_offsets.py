"""Characters that are split over tokens: in ``text_offset``, and where prompt and output meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from diptych.v1 import inference_pb2 as pb
from gateway.frontends.openai.completions_answer import CompletionsAnswer
from gateway.frontends.openai.completions_request import read_completions
from gateway.frontends.openai.logprobs import TextOffsets
from gateway.model.served_model import ServedModel
from gateway.output.detokenizer import REPLACEMENT, Utf8Text
from tests.gateway.frontends.openai.test_answers import ENVELOPE, TOKENS, events, message, sent, token, whole
from tests.gateway.frontends.openai.test_routes import gateway_api
from tests.gateway.scripted_workers import answering

# "😀 hello 漢字 x"
SPLIT: Final = (b"\xf0\x9f", b"\x98", b"\x80", b" hello", b" \xe6", b"\xbc", b"\xa2", b"\xe5\xad\x97", b" x")
OFFSETS: Final = [0, 0, 0, 1, 7, 8, 8, 9, 10]


def scored(data: bytes) -> pb.TokenLogprob:
    """A token of these bytes, as the core tells of it."""
    try:
        return token(data.decode(), -1)
    except UnicodeDecodeError:
        return token(data.decode(errors="replace"), -1, data)


def after(prompt: bytes, left_out: str = "", **members: Any) -> CompletionsAnswer:
    """The answer to a prompt of ids, which stand for these bytes."""

    def text_after(ids: Sequence[int]) -> Utf8Text:
        unfinished = Utf8Text(prompt).unfinished if ids else b""
        return Utf8Text(unfinished, left_out if unfinished else "")

    asked = read_completions({"model": "m", "prompt": [5], "logprobs": 0, **members})
    return CompletionsAnswer(asked, **ENVELOPE, **(TOKENS | {"text_after": text_after}))


@pytest.mark.parametrize("cut", range(len(SPLIT) + 1))
async def test_whole_and_streamed_with_the_prompt_in_front(cut: int) -> None:
    """What is split is in the prompt, in the output, or begins in one and ends in the other."""
    info = pb.PromptInfo(logprobs=map(scored, SPLIT[:cut]))
    prompt = b"".join(SPLIT[:cut])
    end = pb.OutputDelta(logprobs=map(scored, SPLIT[cut:]), finish_reason=pb.FINISH_REASON_LENGTH)
    made = await whole(after(prompt, echo=True), [message(end, prompt=info)])
    assert made["choices"][0]["logprobs"]["text_offset"] == OFFSETS

    answer = after(prompt, echo=True, stream=True, n=2)
    answer.begin("r")
    text = await sent(answer, 0, message(prompt=info))
    for one in map(scored, SPLIT[cut:]):
        text += await sent(answer, 0, message(*(pb.OutputDelta(index=i, logprobs=[one]) for i in range(2))))
    found: dict[int, list[int]] = {0: [], 1: []}
    for event in events(text):
        (choice,) = event["choices"]
        found[choice["index"]] += choice["logprobs"]["text_offset"]
    assert found == {0: OFFSETS, 1: OFFSETS}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("said", "offsets"), [(SPLIT[1:4], [0, 0, 1]), ((b"A", b"B"), [0, 1])])
async def test_an_output_may_begin_within_a_character_of_the_prompt(
    stream: bool, said: tuple[bytes, ...], offsets: list[int]
) -> None:
    answer = after(SPLIT[0], REPLACEMENT, stream=stream)
    answer.begin("r")
    end = pb.OutputDelta(logprobs=map(scored, said), finish_reason=pb.FINISH_REASON_LENGTH)
    made = message(end, prompt=pb.PromptInfo())
    found = events(await sent(answer, 0, made))[-1] if stream else await whole(answer, [made])
    assert found["choices"][0]["logprobs"]["text_offset"] == offsets


def test_what_is_no_character_counts_as_what_is_shown_for_it() -> None:
    data = [b"\xf0\x9f", b"a", b"\x80", b"\xe6", b"\xe6b", b"c"]
    offsets = TextOffsets()
    shown = b"".join(data).decode(errors="replace")
    assert shown == "\ufffda\ufffd\ufffd\ufffdbc"
    # The second begins where it is certain that the first is no character.
    assert [offsets.take(0, one) for one in data] == [0, 0, 2, 3, 3, 6]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("completed", [False, True])
async def test_a_prompt_may_end_within_a_character(
    bundled: ServedModel, redis_url: str, echo: bool, completed: bool
) -> None:
    """A completed one is the output's first, with the prompt and without it; a broken one is the prompt's."""
    *begun, last = bundled.tokenizer.encode("😀")
    prompt = [*bundled.tokenizer.encode("Hi"), *begun]
    said = [last] if completed else bundled.tokenizer.encode("{}")
    extra = {"return_token_ids": True}
    asked: Any = {"model": bundled.card.name, "prompt": prompt, "extra_body": extra}
    async with gateway_api(bundled, redis_url, answering(said)) as (_, client, _):
        whole = await client.completions.create(**asked, echo=echo)
        stream = await client.completions.create(**asked, echo=echo, stream=True)
        streamed = "".join([piece.choices[0].text async for piece in stream])
        alone = await client.completions.create(**asked, echo=True, max_tokens=0)
    alone_text = "😀" if completed else "{}"
    with_prompt = bundled.tokenizer.decode([*prompt, *said], False)
    assert whole.choices[0].text == streamed == (with_prompt if echo else alone_text)
    assert whole.choices[0].prompt_token_ids == prompt  # type: ignore[attr-defined]
    assert alone.choices[0].text == "Hi\ufffd"
