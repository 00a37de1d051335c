"""What tokens spell and a text does not show: SentencePiece's first space, and control tokens.

Where an output goes on with its prompt the space is text. What is not shown takes none of ``text_offset``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import openai
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.frontends.openai.logprobs import completion_logprobs, prompt_offsets
from gateway.model.served_model import ServedModel
from tests.diptych.runtime.tokenizer.small_models import CHATML, sentencepiece_like, write_folder
from tests.gateway.frontends.openai.test_answers import token
from tests.gateway.frontends.openai.test_routes import root
from tests.gateway.running_gateway import Stack, collect, running, text_of
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, delivered

PROMPT: Final = "the quick"
Prompt = str | tuple[str, ...]  # the latter as ids, each of a text or a control token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("models") / "sentencepiece"
    return ServedModel.load(write_folder(folder, sentencepiece_like(), chat_template=CHATML))


def ids_of(model: ServedModel, parts: tuple[str, ...]) -> list[int]:
    ids: list[int] = []
    for part in parts:
        control = model.tokenizer.id_of(part) if part.startswith("<") else None
        ids += model.tokenizer.encode(part) if control is None else [control]
    return ids


class Prefill(ScriptedPrefill):
    """Scores prompts."""

    async def on_message(self, kind: str, message: Any) -> None:
        if kind == "dispatch" and message.work.HasField("prompt_logprobs"):
            scores = [work_pb2.Score(logprob=-1, rank=1)] * (message.work.prompt_tokens - 1)
            said = work_pb2.PromptScores(id=message.work.id, first_position=1, scores=scores)
            self.say(prompt_scores=said)
        await super().on_message(kind, message)


@contextlib.asynccontextmanager
async def speaking(
    model: ServedModel, redis_url: str, *said: str
) -> AsyncIterator[tuple[Stack, openai.AsyncOpenAI]]:
    """A gateway whose model says this."""
    ids = ids_of(model, said)

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        for choice in work.choices or [0]:
            for index in range(delivered(work), len(ids)):
                score = [work_pb2.Score(logprob=-1, rank=1)] if work.sampling.HasField("logprobs") else []
                worker.tokens(work, index, ids[index : index + 1], choice=choice, scores=score)
            worker.ended(work, choice=choice, finished=work_pb2.FINISH_REASON_LENGTH)

    async with (
        running(model, redis_url, Prefill(), ScriptedDecode(script)) as stack,
        openai.AsyncOpenAI(base_url=f"{root(stack)}/v1", api_key="any", max_retries=0) as client,
    ):
        await stack.until_ready()
        yield stack, client


@pytest.mark.parametrize(
    ("prompt", "echoed", "shown"),
    [
        (PROMPT, PROMPT, " brown fox"),
        ((PROMPT,), PROMPT, " brown fox"),
        (("<s>", PROMPT), "<s> the quick", " brown fox"),
        (("<s>",), "<s>", "brown fox"),
        ((PROMPT, "<|im_end|>"), "the quick<|im_end|>", "brown fox"),
    ],
)
async def test_a_completion_goes_on_with_its_prompt(
    model: ServedModel, redis_url: str, prompt: Prompt, echoed: str, shown: str
) -> None:
    given = prompt if isinstance(prompt, str) else ids_of(model, prompt)
    asked: Any = {"model": model.card.name, "prompt": given}
    async with speaking(model, redis_url, "brown fox") as (_, client):
        for echo in (False, True):
            whole = await client.completions.create(**asked, echo=echo, n=2)
            stream = await client.completions.create(**asked, echo=echo, stream=True)
            streamed = "".join([piece.choices[0].text async for piece in stream])
            expected = echoed + shown if echo else shown
            assert [choice.text for choice in whole.choices] == [expected] * 2
            assert streamed == expected


async def test_an_answer_in_a_chat_is_a_text_of_its_own(model: ServedModel, redis_url: str) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    async with speaking(model, redis_url, "brown fox") as (_, client):
        answer = await client.chat.completions.create(model=model.card.name, messages=messages)
    assert answer.choices[0].message.content == "brown fox"


async def test_a_stop_string_may_begin_with_the_first_space(model: ServedModel, redis_url: str) -> None:
    async with speaking(model, redis_url, "brown fox") as (_, client):
        answer = await client.completions.create(model=model.card.name, prompt=PROMPT, stop=" brown")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize("received", [0, 1, 2])
async def test_a_resumed_output_goes_on_where_it_broke(
    model: ServedModel, redis_url: str, received: int
) -> None:
    said = ids_of(model, ("brown fox",))
    async with speaking(model, redis_url, "brown fox") as (stack, _):
        request = stack.request(PROMPT, stopping=pb.StoppingCriteria(max_tokens=8))
        opened = await collect(stack.stub.StreamGenerate(request))
        again = pb.GenerateRequest(resume_token=opened[0].resume_token, received_token_ids=said[:received])
        again.MergeFrom(request)
        rest = await collect(stack.stub.StreamGenerate(again))
    assert text_of(opened) == " brown fox"
    assert text_of(rest) == (" brown fox", " fox", "")[received]


BROWN: Final = [" brown", "", " fox"]


@pytest.mark.parametrize(
    ("prompt", "skip", "echoed", "said"),
    [
        (PROMPT, True, ["", "the", " quick"], BROWN),
        (PROMPT, False, ["", "the", " quick"], [" brown", "<|im_end|>", " fox"]),
        (" the quick", True, ["", " the", " quick"], BROWN),
        ("  the quick", True, ["", " ", " the", " quick"], BROWN),
        ((PROMPT,), True, ["the", " quick"], BROWN),
        (("<s>", PROMPT), True, ["<s>", " the", " quick"], BROWN),
        ((PROMPT, "<|im_end|>"), True, ["the", " quick", "<|im_end|>"], ["brown", "", " fox"]),
        ((PROMPT, "<|im_end|>"), False, ["the", " quick", "<|im_end|>"], ["brown", "<|im_end|>", " fox"]),
    ],
)
async def test_offsets_are_those_of_the_text(
    model: ServedModel, redis_url: str, prompt: Prompt, skip: bool, echoed: list[str], said: list[str]
) -> None:
    given = prompt if isinstance(prompt, str) else ids_of(model, prompt)
    extra = {"skip_special_tokens": skip, "ignore_eos": True}  # <|im_end|> ends a turn of this template
    asked: Any = {"model": model.card.name, "prompt": given, "logprobs": 0, "extra_body": extra}
    async with speaking(model, redis_url, "brown", "<|im_end|>", "fox") as (_, client):
        for echo in (False, True):
            whole = await client.completions.create(**asked, echo=echo)
            stream = await client.completions.create(**asked, echo=echo, stream=True)
            pieces = [piece.choices[0] async for piece in stream]
            expected = [*echoed, *said] if echo else said
            for choices in (whole.choices, pieces):
                assert cut("".join(choice.text for choice in choices), choices) == expected


def cut(text: str, choices: Any) -> list[str]:
    """The text of each token."""
    scored = [choice.logprobs for choice in choices if choice.logprobs is not None]
    offsets = [offset for one in scored for offset in one.text_offset]
    return [text[start:end] for start, end in zip(offsets, [*offsets[1:], len(text)], strict=True)]


@pytest.mark.parametrize(
    ("text", "pieces", "offsets"),
    [
        (" the", (" ", " the"), [0, 0]),  # of tokenizers that add one to any text
        ("the", (" the", " quick"), [0, 3]),
        ("the", ("the", " quick"), [0, 3]),
        ("  ", ("  ", " "), [0, 1]),
    ],
)
def test_a_space_that_the_tokenizer_added_is_none_of_the_prompts(
    text: str, pieces: tuple[str, ...], offsets: list[int]
) -> None:
    items = [token(piece, -1) for piece in pieces]
    assert completion_logprobs(items, prompt_offsets(text, items, lambda _: False))["text_offset"] == offsets
