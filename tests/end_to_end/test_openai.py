"""OpenAI's own client against the whole system, with the bundled model."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import openai
import pytest

from diptych.client import Client
from tests.end_to_end.stack import Stack

OVERFLOW = re.compile(
    r"^This model's maximum context length is (\d+) tokens. However, you requested (\d+) tokens "
    r"\((\d+) in the messages, (\d+) in the completion\)\..* \(context_length_exceeded\)$"
)
PROMPT = "The capital of France is"
USER: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def stack(bundled: Stack) -> Stack:
    return bundled


def test_http_answers_equal_grpc_answers(stack: Stack, client: openai.OpenAI, model: str) -> None:
    with Client(stack.address) as grpc:
        expected = grpc.generate(PROMPT, max_tokens=12, temperature=0.0)
    asked: Any = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    pieces = [piece.choices[0].text for piece in client.completions.create(**asked, stream=True)]
    assert whole.choices[0].text == "".join(pieces) == expected.text
    assert len(pieces) > 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens == expected.usage.completion_tokens


def test_a_chat_knows_paris(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=USER, max_completion_tokens=16)
    stream = client.chat.completions.create(
        model=model,
        messages=USER,
        max_completion_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    *pieces, last = stream
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    # The second time the prompt's whole blocks are in the prefix cache.
    assert (last.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_running_usage_is_in_each_event(client: openai.OpenAI, model: str) -> None:
    """Load tools such as guidellm ask so; options that this server does not know change nothing."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True, "unknown": 1}
    shared: Any = {"model": model, "max_tokens": 8, "stream": True, "stream_options": options}
    for stream in (
        client.chat.completions.create(messages=USER, **shared),
        client.completions.create(prompt=PROMPT, **shared),
    ):
        used = [chunk.usage for chunk in stream]
        assert len(used) > 3
        counts = [usage.completion_tokens for usage in used]
        assert counts == sorted(counts)
        assert 1 == counts[0] < counts[-1] == counts[-2]
        assert len({usage.prompt_tokens for usage in used}) == 1


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["any", "named"]
)
def test_a_model_whose_template_has_no_tools_calls_one(
    client: openai.OpenAI, model: str, choice: Any
) -> None:
    """The generic form: tools in the system turn, a call as JSON; the second turn has its result."""
    assert client.models.list().data[0].model_extra["tool_calls"] == "generic_json"  # type: ignore[index]
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: Any = {"model": model, "tools": [WEATHER], "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**asked, messages=messages, tool_choice=choice).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls or ()
    function: Any = call.function  # type: ignore[union-attr]
    assert function.name == "get_weather"
    assert json.loads(function.arguments)["city"] in ("Paris", "Rome")
    name, arguments, content = "", "", ""
    for event in client.chat.completions.create(**asked, messages=messages, tool_choice=choice, stream=True):
        delta = event.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or ():
            assert piece.function is not None
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, arguments, content) == (function.name, function.arguments, "")
    messages += [whole.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = client.chat.completions.create(**asked, messages=messages, tool_choice="none").choices[0]
    assert second.message.content
    assert second.message.tool_calls is None


def test_text_stays_text_beside_tools_of_the_generic_form(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": USER, "max_tokens": 24, "temperature": 0, "tools": [WEATHER]}
    plain = client.chat.completions.create(**{**asked, "tools": openai.omit}).choices[0].message.content
    ignored = client.chat.completions.create(**asked, tool_choice="none").choices[0].message
    assert ignored.content == plain
    answer = client.chat.completions.create(**asked).choices[0].message
    assert answer.content or answer.tool_calls
    assert not (answer.content or "").startswith("{")


def test_a_forced_call_cut_by_its_length_leaks_no_markup(client: openai.OpenAI, model: str) -> None:
    for max_tokens in (1, 3, 6, 9, 12):
        asked: Any = {"model": model, "messages": USER, "tools": [WEATHER], "tool_choice": "required"}
        asked["max_tokens"] = max_tokens
        whole = client.chat.completions.create(**asked).choices[0]
        assert (whole.message.content or "", whole.finish_reason) == ("", "length")
        for call in whole.message.tool_calls or ():
            assert call.function.name == "get_weather"  # type: ignore[union-attr]
        for event in client.chat.completions.create(**asked, stream=True):
            assert not event.choices[0].delta.content


def test_n_choices_and_seeds(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": "Once", "max_tokens": 8, "temperature": 1.0, "seed": 5}
    four = client.completions.create(**asked, n=4)
    one = client.completions.create(**asked)
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert four.choices[0].text == one.choices[0].text
    assert len({choice.text for choice in four.choices}) > 1
    texts = ["", "", "", ""]
    for event in client.completions.create(**asked, n=4, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in four.choices]
    chats = client.chat.completions.create(
        model=model, messages=USER, n=3, max_tokens=4, temperature=1.0, seed=5
    )
    assert [choice.index for choice in chats.choices] == [0, 1, 2]


def test_best_of_returns_the_likeliest(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": "Once", "max_tokens": 8, "temperature": 1.0, "seed": 5}
    best = client.completions.create(**asked, best_of=4, logprobs=0).choices[0]
    all_four = client.completions.create(**asked, n=4, logprobs=0).choices
    assert best.logprobs is not None
    assert best.logprobs.token_logprobs is not None
    sums = [sum(choice.logprobs.token_logprobs) for choice in all_four]  # type: ignore[union-attr, arg-type]
    assert best.text == all_four[sums.index(max(sums))].text


def test_logprobs_of_both_shapes(client: openai.OpenAI, model: str) -> None:
    completion = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3
    )
    scored = completion.choices[0].logprobs
    assert scored is not None
    assert scored.tokens is not None
    assert scored.token_logprobs is not None
    assert scored.top_logprobs is not None
    assert "".join(scored.tokens) == completion.choices[0].text
    assert scored.text_offset == [sum(map(len, scored.tokens[:i])) for i in range(6)]
    for token, logprob, top in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True):
        assert len(top) == 3
        assert max(top, key=top.__getitem__) == token  # greedy
        assert top[token] == logprob
        assert sum(math.exp(value) for value in top.values()) <= 1.0001
    ids = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=6, temperature=0, stream=True, logprobs=3
    )
    streamed = [event.choices[0].logprobs for event in ids]
    assert [token for part in streamed if part for token in part.tokens or ()] == scored.tokens
    assert [at for part in streamed if part for at in part.text_offset or ()] == scored.text_offset
    chat = client.chat.completions.create(
        model=model, messages=USER, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert "".join(record.token for record in content) == chat.choices[0].message.content
    assert all(len(record.top_logprobs) == 2 for record in content)
    assert all(bytes(record.bytes or ()).decode() == record.token for record in content)


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_scores_the_prompt(client: openai.OpenAI, model: str, max_tokens: int) -> None:
    """As lm-eval asks: the prompt's own logprobs, its first token without one."""
    asked: Any = {"model": model, "prompt": PROMPT, "temperature": 0, "logprobs": 1, "echo": True}
    whole = client.completions.create(**asked, max_tokens=max_tokens).choices[0]
    assert whole.text.startswith(PROMPT)
    assert (whole.text == PROMPT) is (max_tokens == 0)
    scored = whole.logprobs
    assert scored is not None
    assert scored.token_logprobs is not None
    assert scored.top_logprobs is not None
    assert scored.tokens is not None
    assert "".join(scored.tokens) == whole.text
    assert scored.token_logprobs[0] is None
    assert scored.top_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in scored.token_logprobs[1:])
    text, tokens = "", []
    for event in client.completions.create(**asked, max_tokens=max_tokens, stream=True):
        text += event.choices[0].text
        tokens += (event.choices[0].logprobs.tokens or []) if event.choices[0].logprobs else []
    assert (text, tokens) == (whole.text, scored.tokens)


def test_a_list_of_prompts_scored_at_once(client: openai.OpenAI, model: str) -> None:
    prompts = ["One two", "Paris is in France", "a"]
    asked: Any = {"model": model, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    together = client.completions.create(**asked, prompt=prompts)
    alone = [client.completions.create(**asked, prompt=prompt).choices[0] for prompt in prompts]
    for one, other in zip(together.choices, alone, strict=True):
        assert one.text == other.text
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert (
            one.logprobs.token_logprobs[1:]
            == pytest.approx(  # type: ignore[index]
                other.logprobs.token_logprobs[1:],  # type: ignore[index]
                abs=1e-4,
            )
        )


def test_what_a_client_does_wrong(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="x", max_tokens=1_000_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_tokens")
    found = OVERFLOW.search(long.value.body["message"])  # type: ignore[index]
    assert found is not None
    limit, asked, prompt, completion = map(int, found.groups())
    assert completion == 1_000_000
    assert asked == prompt + completion > limit
    client.completions.create(model=model, prompt="x", max_tokens=1)
    with pytest.raises(openai.BadRequestError) as longer:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a b " * limit}])
    assert (longer.value.code, longer.value.param) == ("context_length_exceeded", "messages")
    # By this litellm and other clients know it, wherever it stands in the text.
    assert "This model's maximum context length is" in str(longer.value)
    assert "context_length_exceeded" in str(longer.value)  # LangChain, which sees no more than this text
    with pytest.raises(openai.BadRequestError) as newer:
        client.chat.completions.create(model=model, messages=USER, max_completion_tokens=limit)
    assert newer.value.param == "max_completion_tokens"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=USER, top_p=3)
    assert (wrong.value.param, wrong.value.code) == ("top_p", "invalid_parameter")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4o", prompt="x")
    with pytest.raises(openai.BadRequestError) as embedding:
        client.embeddings.create(model=model, input="x")
    assert embedding.value.code == "unsupported_feature"
