"""`/v1/responses` through the whole system with OpenAI's own client: tools, a second turn, a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.end_to_end.stack import http_root
from tests.end_to_end.tiny_system import MODEL, Served

CLOCK: Any = {
    "type": "function",
    "name": "now",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    root = http_root(served.stack)
    with openai.OpenAI(base_url=f"{root}/v1", api_key="any", max_retries=0, timeout=60) as one:
        yield one


def test_a_required_call_and_its_result_make_a_second_turn(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "tools": [CLOCK], "temperature": 1.0, "extra_body": {"seed": 3}}
    forced: Any = {**asked, "tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(input="What time is it?", **forced)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (first.status, call.name, call.status) == ("completed", "now", "completed")
    assert json.loads(call.arguments)["zone"] in ("UTC", "CET")
    history: Any = [
        {"role": "user", "content": "What time is it?"},
        *[item.to_dict() for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    second = client.responses.create(input=history, **asked, tool_choice="none", max_output_tokens=16)
    assert second.output_text
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_streamed_call_has_its_arguments_in_pieces(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Time?", "tools": [CLOCK], "parallel_tool_calls": False}
    sampling: Any = {"temperature": 1.0, "extra_body": {"seed": 5}}
    whole = client.responses.create(tool_choice="required", **asked, **sampling)
    with client.responses.stream(tool_choice="required", **asked, **sampling) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    (call,) = [item for item in whole.output if item.type == "function_call"]
    (built,) = [item for item in final.output if item.type == "function_call"]
    assert "".join(deltas) == built.arguments == call.arguments
    assert built.call_id


class Answer(pydantic.BaseModel):
    """Form of an answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    ok: bool


def test_a_schema_is_kept_and_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="Fine?", text_format=Answer, temperature=1.0)
    assert isinstance(parsed.output_parsed, Answer)


def test_a_stateful_request_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
