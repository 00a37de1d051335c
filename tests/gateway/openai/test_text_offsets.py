"""``text_offset``: characters of the whole text, however they are split over tokens."""

from __future__ import annotations

from typing import Final

import pytest

from diptych.v1 import inference_pb2 as pb
from gateway.openai.text_offsets import TextOffsets
from tests.gateway.openai.test_answers import completion, events, message, sent, token, whole

# "😀 hello 漢字 x"
SPLIT: Final = (b"\xf0\x9f", b"\x98", b"\x80", b" hello", b" \xe6", b"\xbc", b"\xa2", b"\xe5\xad\x97", b" x")
OFFSETS: Final = [0, 0, 0, 1, 7, 8, 8, 9, 10]


def scored(data: bytes) -> pb.TokenLogprob:
    """A token of these bytes, as the core tells of it."""
    try:
        return token(data.decode(), -1)
    except UnicodeDecodeError:
        return token(data.decode(errors="replace"), -1, data)


@pytest.mark.parametrize("cut", range(len(SPLIT) + 1))
async def test_whole_and_streamed_with_the_prompt_in_front(cut: int) -> None:
    """What is split is in the prompt, in the output, or begins in one and ends in the other."""
    info = pb.PromptInfo(logprobs=map(scored, SPLIT[:cut]))
    end = pb.OutputDelta(logprobs=map(scored, SPLIT[cut:]), finish_reason=pb.FINISH_REASON_LENGTH)
    made = await whole(completion(echo=True, logprobs=0), [message(end, prompt=info)])
    assert made["choices"][0]["logprobs"]["text_offset"] == OFFSETS

    answer = completion(echo=True, logprobs=0, stream=True, n=2)
    answer.begin("r")
    text = await sent(answer, 0, message(prompt=info))
    for one in map(scored, SPLIT[cut:]):
        text += await sent(answer, 0, message(*(pb.OutputDelta(index=i, logprobs=[one]) for i in range(2))))
    found: dict[int, list[int]] = {0: [], 1: []}
    for event in events(text):
        (choice,) = event["choices"]
        found[choice["index"]] += choice["logprobs"]["text_offset"]
    assert found == {0: OFFSETS, 1: OFFSETS}


def test_what_is_no_character_counts_as_what_is_shown_for_it() -> None:
    data = [b"\xf0\x9f", b"a", b"\x80", b"\xe6", b"\xe6b", b"c"]
    offsets = TextOffsets()
    shown = b"".join(data).decode(errors="replace")
    assert shown == "\ufffda\ufffd\ufffd\ufffdbc"
    # The second begins where it is certain that the first is no character.
    assert [offsets.take(one) for one in data] == [0, 0, 2, 3, 3, 6]
