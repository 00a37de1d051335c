"""Structured output and tools, through OpenAI's own client and the whole system."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.end_to_end.stack import Stack
from tests.end_to_end.tiny_system import Served

USER: Any = [{"role": "user", "content": "the quick brown fox"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("weather", "news")
]


@pytest.fixture(scope="module")
def stack(served: Served) -> Stack:
    return served.stack


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_holds(client: openai.OpenAI, model: str, seed: int) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model=model, messages=USER, response_format=wanted, max_tokens=200, temperature=1.0, seed=seed
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert found["city"] in ("Paris", "Rome")
    assert found["days"] in (1, 2, 3)
    assert answer.choices[0].finish_reason == "stop"


OPEN_SCHEMA = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
"""As pydantic and LangChain write schemas: nothing is said of further members."""


@pytest.mark.parametrize("seed", range(4))
def test_objects_without_additional_properties_are_closed(
    client: openai.OpenAI, model: str, seed: int
) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": OPEN_SCHEMA}}
    asked: Any = {"model": model, "messages": USER, "max_tokens": 300, "temperature": 1.0, "seed": seed}
    answer = client.chat.completions.create(**asked, response_format=wanted).choices[0]
    assert (json.loads(answer.message.content or "").keys(), answer.finish_reason) == (
        {"city", "days"},
        "stop",
    )
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": OPEN_SCHEMA}} for name in "ab"
    ]
    answer = client.chat.completions.create(
        **asked, tools=tools, tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or ()
    assert json.loads(call.function.arguments).keys() == {"city", "days"}  # type: ignore[union-attr]


def test_history_of_an_answer_is_accepted_as_clients_keep_it(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "max_tokens": 100, "temperature": 1.0, "seed": 1, "tools": TOOLS[1:]}
    first = client.chat.completions.create(
        **asked, messages=USER, tool_choice={"type": "function", "function": {"name": "news"}}
    )
    turn = first.choices[0].message.model_dump()
    (call,) = turn["tool_calls"]
    call["function"]["parsed_arguments"] = json.loads(call["function"]["arguments"])
    turn |= {"parsed": None, "reasoning_content": "hm", "id": "msg_1", "provider_specific_fields": {}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain", "cache_control": {}}
    second = client.chat.completions.create(**{**asked, "max_tokens": 100}, messages=[*USER, turn, result])
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_choice_and_an_expression_hold(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": "the", "max_tokens": 64, "temperature": 1.0, "seed": 1}
    one_of = client.completions.create(**asked, extra_body={"guided_choice": ["red", "green"]})
    assert one_of.choices[0].text in ("red", "green")
    matched = client.completions.create(**asked, extra_body={"structured_outputs": {"regex": "[ab]{3}c"}})
    assert matched.choices[0].text[3:] == "c"
    assert set(matched.choices[0].text[:3]) <= {"a", "b"}


def test_classes_are_ascii_and_cut_outputs_have_whole_characters(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": "the", "temperature": 1.0}
    for seed in range(6):
        phone = client.completions.create(
            **asked, seed=seed, max_tokens=40, extra_body={"guided_regex": r"\d{3}-\w\s\d{4}"}
        )
        assert re.fullmatch(r"[0-9]{3}-[0-9A-Za-z_][ \t\n\v\f\r][0-9]{4}", phone.choices[0].text)
    four_bytes = {"guided_regex": "[\U0001f600-\U0001f64f]{9}"}
    for max_tokens in range(1, 9):
        whole = client.completions.create(**asked, seed=1, max_tokens=max_tokens, extra_body=four_bytes)
        stream = client.completions.create(
            **asked, seed=1, max_tokens=max_tokens, extra_body=four_bytes, stream=True
        )
        assert whole.choices[0].finish_reason == "length"
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        assert "\ufffd" not in whole.choices[0].text


def test_everyday_schemas_hold(client: openai.OpenAI, model: str) -> None:
    day = {"enum": ["Mo", "Tu", "We"]}
    schema = {
        "type": "object",
        "properties": {
            "phone": {"type": "string", "format": "phone", "pattern": r"^(?=.*\d)[a\d]{2}$"},
            "days": {"type": "array", "items": day, "uniqueItems": True, "minItems": 3},
            "hours": {"type": "object", "additionalProperties": {"const": 1}, "propertyNames": day},
        },
        "required": ["phone", "days", "hours"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_object", "schema": schema}
    answer = client.chat.completions.create(
        model=model, messages=USER, response_format=wanted, max_tokens=400, temperature=1.0, seed=2
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert re.fullmatch("(?=.*[0-9])[a0-9]{2}", found["phone"])
    assert sorted(found["days"]) == ["Mo", "Tu", "We"]
    assert found["hours"].keys() <= {"Mo", "Tu", "We"}
    schema["properties"]["phone"] = {"type": "array", "uniqueItems": True}  # type: ignore[index]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=USER, response_format=wanted)
    assert refused.value.param == "response_format.schema"
    assert "uniqueItems, at properties.phone" in str(refused.value)


def test_fault_of_a_tool_has_the_path_that_the_client_wrote(client: openai.OpenAI, model: str) -> None:
    for function, param in (
        ({"name": "no good"}, "tools[0].function.name"),
        ({"name": "f", "parameters": {"type": "string"}}, "tools[0].function.parameters"),
    ):
        tools: Any = [{"type": "function", "function": function}]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=model, messages=USER, tools=tools)
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=USER, extra_body={"session_id": "a"})
    assert refused.value.param == "session_id"


def test_a_bad_schema_is_named_as_the_client_wrote_it(client: openai.OpenAI, model: str) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=USER, response_format=bad)
    assert refused.value.param == "response_format.json_schema.schema"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt="x", extra_body={"guided_regex": "("})
    assert refused.value.param == "guided_regex"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "news"}}])
def test_a_tool_is_called(client: openai.OpenAI, model: str, choice: Any) -> None:
    asked: Any = {
        "model": model,
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 200,
        "temperature": 1.0,
    }
    # More calls may follow a required one, and a model of random weights does not always stop in time.
    for asked["seed"] in range(20):
        whole = client.chat.completions.create(**asked)
        if whole.choices[0].finish_reason == "tool_calls":
            break
    assert whole.choices[0].finish_reason == "tool_calls"
    calls = whole.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.function.name in (["news"] if choice != "required" else ["news", "weather"])
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
    # The client's own accumulation of a stream comes to the same calls.
    asked.pop("messages")
    with client.chat.completions.stream(**asked, messages=USER) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    streamed = final.choices[0].message.tool_calls
    assert streamed
    assert final.choices[0].finish_reason == "tool_calls"
    said = [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]
    assert [(call.function.name, call.function.arguments) for call in streamed] == said
    # And the conversation goes on with what the tool said.
    turns = [
        *USER,
        whole.choices[0].message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls),
    ]
    asked.pop("tool_choice")
    after = client.chat.completions.create(**{**asked, "messages": turns, "max_tokens": 4})
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens


def test_a_client_that_leaves_frees_its_blocks(stack: Stack, client: openai.OpenAI, model: str) -> None:
    for _ in range(5):
        with client.completions.create(
            model=model, prompt="the", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
    stack.wait_idle()
