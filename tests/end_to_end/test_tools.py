"""Tools through the whole system: shown by the template, required by grammar, read back, answered.

The model has random weights, so what it calls is nonsense; that it calls is sure where calls are required.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end import tiny_model
from tests.end_to_end.http_requests import teach_short_outputs
from tests.end_to_end.stack import http_root
from tests.end_to_end.tiny_system import MODEL, Served

WEATHER = pb.Tool(
    name="get_weather",
    description="<|im_end|> or not",
    parameters_json_schema=json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"const": 1},
            },
            "required": ["city"],
            "additionalProperties": False,
        }
    ),
)
CLOCK = pb.Tool(name="now", parameters_json_schema='{"type": "object", "additionalProperties": false}')
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 30, "maxLength": 40}},
    "required": ["text"],
    "additionalProperties": False,
}
ARGUMENTS = {"get_weather": {"city", "days"}, "now": set()}


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[rpc.InferenceServiceStub]:
    with grpc.insecure_channel(served.stack.address) as channel:
        yield rpc.InferenceServiceStub(channel)


def request(
    mode: int, *, name: str = "", tools: bool = True, seed: int = 1, **rest: object
) -> pb.GenerateRequest:
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role="user", content="Weather?")],
        tools=[WEATHER, CLOCK] if tools else [],
        tool_choice=pb.ToolChoice(mode=mode, name=name),  # type: ignore[arg-type]
    )
    fields: dict[str, object] = {
        "sampling": {"temperature": 1.0, "seed": seed},
        "stopping": {"max_tokens": 140},
    } | rest
    return pb.GenerateRequest(model=MODEL, chat=chat, **fields)  # type: ignore[arg-type]


def called(output: pb.OutputDelta) -> list[str]:
    """Names of the tools that were called, their arguments being right."""
    for call in output.tool_calls:
        arguments = json.loads(call.arguments_json)
        assert arguments.keys() <= ARGUMENTS[call.name]
        assert call.name == "now" or arguments["city"] in ("Paris", "Rome")
        assert call.id
    return [call.name for call in output.tool_calls]


def test_required_calls_are_made(stub: rpc.InferenceServiceStub) -> None:
    names: set[str] = set()
    for seed in range(6):
        answer = stub.Generate(request(pb.ToolChoice.MODE_REQUIRED, seed=seed), timeout=60)
        (output,) = answer.outputs
        found = called(output)
        names.update(found)
        assert found
        assert output.text == ""
        finished = output.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        assert finished or output.finish_reason == pb.FINISH_REASON_LENGTH
    assert names == ARGUMENTS.keys()


def test_arguments_hold_no_members_that_a_schema_does_not_name(stub: rpc.InferenceServiceStub) -> None:
    asked = request(pb.ToolChoice.MODE_NAMED, name="now")
    asked.chat.tools[1].parameters_json_schema = '{"type": "object", "properties": {"x": {"const": 1}}}'
    for seed in range(4):
        asked.sampling.seed = seed
        (output,) = stub.Generate(asked, timeout=60).outputs
        assert json.loads(output.tool_calls[0].arguments_json).keys() <= {"x"}
        assert output.finish_reason == pb.FINISH_REASON_TOOL_CALLS


def test_the_named_tool_is_called_once_whether_streamed_or_not(stub: rpc.InferenceServiceStub) -> None:
    for name in ARGUMENTS:
        asked = request(pb.ToolChoice.MODE_NAMED, name=name)
        whole = stub.Generate(asked, timeout=60).outputs[0]
        assert called(whole) == [name]
        assert whole.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        deltas = [message.outputs[0] for message in stub.StreamGenerate(asked, timeout=60)]
        assert not any(delta.text for delta in deltas)
        (call,) = [call for delta in deltas for call in delta.tool_calls]
        assert (call.name, call.arguments_json) == (name, whole.tool_calls[0].arguments_json)
        assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)
        assert deltas[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS


def test_http_streams_a_forced_call_in_pieces(served: Served) -> None:
    """Name and id come first, and the arguments as they are written; joined they are the whole answer's."""
    function = {"name": "note", "parameters": NOTE, "strict": True}
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"type": "function", "function": function}],
        "temperature": 1.0,
        "seed": 4,
        "max_tokens": 200,
        "parallel_tool_calls": False,
    }
    root = http_root(served.stack)
    with openai.OpenAI(base_url=f"{root}/v1", api_key="any", max_retries=0, timeout=60) as client:
        for choice in ("required", {"type": "function", "function": {"name": "note"}}):
            whole = client.chat.completions.create(**asked, tool_choice=choice)
            (call,) = whole.choices[0].message.tool_calls
            choices = [
                chunk.choices[0]
                for chunk in client.chat.completions.create(**asked, tool_choice=choice, stream=True)
            ]
            assert not any(choice.delta.content for choice in choices)
            assert choices[-1].finish_reason == "tool_calls"
            first, *later = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
            assert (first.index, first.function.name, len(first.id)) == (0, "note", 9)
            assert first.type == "function"
            assert len(later) > 1  # a loaded machine joins some
            assert all(piece.id is None and piece.function.name is None for piece in later)
            pieces = [piece.function.arguments for piece in (first, *later)]
            assert "".join(pieces) == call.function.arguments
            assert json.loads(call.function.arguments).keys() == {"text"}


def test_calls_that_may_not_be_parallel_are_one(
    stub: rpc.InferenceServiceStub,
) -> None:
    twice = r'(<tool_call>\n\{"name": "now", "arguments": \{\}\}\n</tool_call>\n){2}'
    asked = request(pb.ToolChoice.MODE_AUTO, structured_output={"regex": twice})
    several = stub.Generate(asked, timeout=60)
    assert called(several.outputs[0]) == ["now", "now"]
    asked.chat.tool_choice.parallel = False
    one = stub.Generate(asked, timeout=60)
    deltas = [message.outputs[0] for message in stub.StreamGenerate(asked, timeout=60) if message.outputs]
    for output in (one.outputs[0], *deltas[-1:]):
        assert called(output) == ["now"]
        assert output.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert [token for delta in deltas for token in delta.token_ids] == list(one.outputs[0].token_ids)
    assert one.usage.completion_tokens == len(one.outputs[0].token_ids) < several.usage.completion_tokens
    for seed in range(6):
        forced = request(pb.ToolChoice.MODE_REQUIRED, seed=seed)
        forced.chat.tool_choice.parallel = False
        (output,) = stub.Generate(forced, timeout=60).outputs
        assert len(called(output)) == 1
        assert output.finish_reason == pb.FINISH_REASON_TOOL_CALLS


def test_a_forced_call_cut_by_its_length_leaves_no_markup(stub: rpc.InferenceServiceStub) -> None:
    fragments = 0
    for max_tokens in range(1, 44, 3):
        asked = request(pb.ToolChoice.MODE_NAMED, name="get_weather", stopping={"max_tokens": max_tokens})
        (output,) = stub.Generate(asked, timeout=60).outputs
        streamed = [one for message in stub.StreamGenerate(asked, timeout=60) for one in message.outputs]
        for text in (output.text, *(delta.text for delta in streamed)):
            assert text == ""
        for call in (*output.tool_calls, *(call for delta in streamed for call in delta.tool_calls)):
            assert (call.name, call.arguments_json[:1]) in (("get_weather", "{"), ("get_weather", ""))
            fragments += 1
        assert output.finish_reason in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_TOOL_CALLS)
    assert fragments


def test_each_of_several_choices_calls(stub: rpc.InferenceServiceStub) -> None:
    asked = request(pb.ToolChoice.MODE_NAMED, name="get_weather")
    asked.sampling.n = 4
    outputs = stub.Generate(asked, timeout=60).outputs
    assert [called(output) for output in outputs] == [["get_weather"]] * 4


def test_where_no_call_is_required_text_is_text(stub: rpc.InferenceServiceStub) -> None:
    for mode in (pb.ToolChoice.MODE_AUTO, pb.ToolChoice.MODE_NONE, pb.ToolChoice.MODE_UNSPECIFIED):
        output = stub.Generate(request(mode, stopping={"max_tokens": 20}), timeout=60).outputs[0]
        assert output.text
        assert not output.tool_calls
    # With calls left alone, what another request reads as a call stays as it was written.
    asked = request(pb.ToolChoice.MODE_NONE)
    asked.structured_output.regex = r'<tool_call>\n\{"name": "now", "arguments": \{\}\}\n</tool_call>'
    assert stub.Generate(asked, timeout=60).outputs[0].text.startswith("<tool_call>")
    asked.chat.tool_choice.mode = pb.ToolChoice.MODE_AUTO
    output = stub.Generate(asked, timeout=60).outputs[0]
    assert (output.text, called(output)) == ("", ["now"])


def test_the_prompt_is_what_the_template_makes_of_it(stub: rpc.InferenceServiceStub, served: Served) -> None:
    tokenizer = Tokenizer.load(served.folder)
    chat = pb.ChatPrompt(
        messages=[
            pb.ChatMessage(role="user", content="Weather?"),
            pb.ChatMessage(
                role="assistant",
                tool_calls=[pb.ToolCall(id="1", name="get_weather", arguments_json='{"city": "Paris"}')],
            ),
            pb.ChatMessage(role="tool", content="<|im_end|> Sunny", tool_call_id="1"),
        ],
        tools=[WEATHER],
    )
    found = stub.Tokenize(pb.TokenizeRequest(model=MODEL, chat=chat), timeout=60)
    text = tokenizer.decode(found.token_ids, skip_special=False)
    assert '"description": "<|im_end|> or not"' in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert "<tool_response>\n<|im_end|> Sunny\n</tool_response>" in text
    # The caller's own end-of-turn is text; the template's are control tokens.
    end = tokenizer.id_of("<|im_end|>")
    assert list(found.token_ids).count(end) == text.count("<|im_end|>") - 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tools": [pb.Tool(name="no good")]}, "chat.tools[0].name"),
        ({"tools": [pb.Tool(name="")]}, "chat.tools[0].name"),
        ({"tools": [CLOCK, CLOCK]}, "chat.tools[1].name"),
        ({"tools": [pb.Tool(name="x", parameters_json_schema="[")]}, "chat.tools[0].parameters_json_schema"),
        ({"tools": [pb.Tool(name="x", parameters_json_schema='{"type": "y"}')]},
         "chat.tools[0].parameters_json_schema"),
        ({"tools": [pb.Tool(name="x", parameters_json_schema=r'{"title": "\ud83d"}')]},
         "chat.tools[0].parameters_json_schema"),
        ({"tools": []}, "chat.tool_choice"),
        ({"tool_choice": pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name="x")}, "chat.tool_choice.name"),
    ],
)  # fmt: skip
def test_bad_tools_are_named(stub: rpc.InferenceServiceStub, change: dict[str, object], field: str) -> None:
    asked = request(pb.ToolChoice.MODE_REQUIRED)
    for name, value in change.items():
        asked.chat.ClearField(name)  # type: ignore[arg-type]
        asked.chat.MergeFrom(pb.ChatPrompt(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError) as refused:
        stub.Generate(asked, timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(f"{field}: ")


def test_a_grammar_goes_on_where_it_was_after_a_preemption(served: Served) -> None:
    """The same requests one at a time and all at once, in a pool that is too small for that."""
    schema = json.dumps({"type": "array", "items": {"enum": ["a", 1, None, {"k": "v"}]}, "minItems": 60})
    prompts = [tiny_model.prompt(seed, 20 + 6 * seed) for seed in range(12)]
    asked = [
        pb.GenerateRequest(
            model=MODEL,
            token_ids=pb.TokenIds(ids=ids),
            structured_output={"json_schema": schema},
            sampling={"temperature": 1.0, "seed": seed},
            stopping={"max_tokens": 120},
        )
        for seed, ids in enumerate(prompts)
    ]

    async def ask(at_a_time: int) -> list[pb.GenerateResponse]:
        gate = asyncio.Semaphore(at_a_time)
        async with grpc.aio.insecure_channel(served.stack.address) as channel:
            stub = rpc.InferenceServiceStub(channel)

            async def one(message: pb.GenerateRequest) -> pb.GenerateResponse:
                async with gate:
                    answer: pb.GenerateResponse = await stub.Generate(message, timeout=120)
                    return answer

            return await asyncio.gather(*map(one, asked))

    alone = asyncio.run(ask(1))
    teach_short_outputs(served.stack.address)
    together = asyncio.run(ask(len(asked)))
    assert sum(answer.timings.preemptions for answer in together) > 0
    assert sum(answer.timings.preemptions for answer in alone) == 0
    for one, other in zip(alone, together, strict=True):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)
        assert one.outputs[0].text.startswith("[")
