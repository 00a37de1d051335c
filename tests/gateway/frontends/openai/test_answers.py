"""Messages of the core in, JSON out: what needs no gateway to be seen."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from diptych.v1 import inference_pb2 as pb
from gateway.frontends.openai.answer import DONE, Answer, blocks
from gateway.frontends.openai.chat_answer import ChatAnswer
from gateway.frontends.openai.chat_request import read_chat
from gateway.frontends.openai.completions_answer import CompletionsAnswer
from gateway.frontends.openai.completions_request import read_completions
from gateway.frontends.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from gateway.frontends.openai.request_builder import param_of
from gateway.output.detokenizer import Utf8Text
from gateway.request.structured_output import structured_output

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "héllo"}
ENVELOPE: Any = {"model": "served", "fingerprint": "fp_1", "created": 7}
TOKENS: Any = {
    "decode": lambda ids: "".join(f"<{i}>" for i in ids),
    "text_after": lambda _: Utf8Text(),
    "special": lambda _: False,
}
"""What an answer knows of the model's tokens."""
CALL = pb.ToolCall(id="c1", name="weather", arguments_json='{"city": "Paris"}')


def chat(**members: Any) -> Answer:
    return ChatAnswer(read_chat({**CHAT, **members}), **ENVELOPE)


def completion(**members: Any) -> Answer:
    asked = read_completions({**COMPLETION, **members})
    return CompletionsAnswer(asked, **ENVELOPE, **TOKENS)


def events(text: str) -> list[dict[str, Any]]:
    """Parsed; every event is one line, and [DONE] is left out."""
    parsed = []
    for event in text.removesuffix(DONE).split("\n\n")[:-1]:
        assert event.startswith("data: ")
        assert "\n" not in event
        parsed.append(json.loads(event.removeprefix("data: ")))
    return parsed


async def whole(answer: Answer, messages: list[pb.GenerateResponse]) -> Any:
    return json.loads("".join(await answer.whole("r", messages)))


async def sent(answer: Answer, prompt: int, message: pb.GenerateResponse) -> str:
    return b"".join(blocks(await answer.events(prompt, message))).decode()


def message(*outputs: pb.OutputDelta, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(outputs=outputs, **fields)


def token(text: str, logprob: float | None = None, utf8: bytes = b"", top: Any = ()) -> pb.TokenLogprob:
    made = pb.TokenLogprob(text=text, utf8=utf8, top=top)
    if logprob is not None:
        made.logprob = logprob
    return made


async def test_tool_calls_of_a_whole_answer() -> None:
    output = pb.OutputDelta(tool_calls=[CALL], finish_reason=pb.FINISH_REASON_TOOL_CALLS)
    made = await whole(chat(), [message(output)])
    (choice,) = made["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    }


async def test_streamed_tool_calls_are_numbered_by_choice() -> None:
    answer = chat(stream=True, n=2)
    answer.begin("r")
    text = await sent(answer, 0, message(pb.OutputDelta(index=1, text="Let me see."), prompt=pb.PromptInfo()))
    text += await sent(answer, 0, message(pb.OutputDelta(index=1, tool_calls=[CALL, CALL])))
    text += await sent(answer, 0, message(pb.OutputDelta(index=0, tool_calls=[CALL])))
    last = pb.OutputDelta(index=1, tool_calls=[CALL], finish_reason=pb.FINISH_REASON_TOOL_CALLS)
    text += await sent(answer, 0, message(last))
    choices = [event["choices"][0] for event in events(text + answer.last_events())]
    assert [choice["index"] for choice in choices] == [1, 1, 0, 1]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": "Let me see."}
    assert [call["index"] for call in deltas[1]["tool_calls"]] == [0, 1]
    assert deltas[2]["role"] == "assistant"
    assert [call["index"] for call in deltas[2]["tool_calls"]] == [0]
    assert [call["index"] for call in deltas[3]["tool_calls"]] == [2]
    assert "role" not in deltas[3]
    assert "content" not in deltas[3]
    assert choices[3]["finish_reason"] == "tool_calls"


async def test_running_usage_is_in_each_event_and_the_last_is_the_whole() -> None:
    options = {"continuous_usage_stats": True, "include_usage": True, "new_in_some_client": {"x": 1}}
    for answer in (
        chat(stream=True, stream_options=options),
        completion(stream=True, stream_options=options, prompt="a"),
    ):
        assert answer._asked.builders[0].request.response.token_ids
        answer.begin("r")
        info = pb.PromptInfo(token_count=7, cached_token_count=2)
        text = await sent(answer, 0, message(pb.OutputDelta(text="a", token_ids=[5]), prompt=info))
        text += await sent(answer, 0, message(pb.OutputDelta(text="b", token_ids=[6, 7])))
        used = pb.Usage(prompt_tokens=7, completion_tokens=4, cached_prompt_tokens=2)
        end = pb.OutputDelta(token_ids=[8], finish_reason=pb.FINISH_REASON_STOP)
        text += await sent(answer, 0, message(end, usage=used))
        made = events(text + answer.last_events())
        counted = [(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]) for event in made]
        assert counted == [(7, 1), (7, 3), (7, 4), (7, 4)]
        assert made[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert [len(event["choices"]) for event in made] == [1, 1, 1, 0]
        assert "token_ids" not in text


async def test_further_arguments_of_a_streamed_call_have_its_index_and_no_name() -> None:
    answer = chat(stream=True)
    answer.begin("r")
    text = ""
    for calls in (
        [pb.ToolCall(id="c1", name="f", arguments_json="{")],
        [pb.ToolCall(arguments_json="}"), pb.ToolCall(id="c2", name="g", arguments_json="")],
        [pb.ToolCall(arguments_json="{}")],
    ):
        text += await sent(answer, 0, message(pb.OutputDelta(tool_calls=calls), prompt=pb.PromptInfo()))
    first, second, third = (event["choices"][0]["delta"]["tool_calls"] for event in events(text))
    function = {"name": "f", "arguments": "{"}
    assert first == [{"index": 0, "id": "c1", "type": "function", "function": function}]
    assert second[0] == {"index": 0, "function": {"arguments": "}"}}
    assert (second[1]["index"], second[1]["id"]) == (1, "c2")
    assert third == [{"index": 1, "function": {"arguments": "{}"}}]


async def test_reasoning_has_both_names_in_deltas_and_messages() -> None:
    parts = [
        pb.OutputDelta(reasoning_content="H\u2028"),
        pb.OutputDelta(reasoning_content="m", text="Yes"),
        pb.OutputDelta(text="."),
        pb.OutputDelta(finish_reason=pb.FINISH_REASON_STOP),
    ]
    used = pb.Usage(prompt_tokens=1, completion_tokens=5, reasoning_tokens=3)
    answer = chat(stream=True, stream_options={"include_usage": True})
    answer.begin("r")
    text = ""
    for part in parts[:-1]:
        text += await sent(answer, 0, message(part, prompt=pb.PromptInfo()))
    text += await sent(answer, 0, message(parts[-1], usage=used))
    *made, last = events(text + answer.last_events())
    assert [event["choices"][0]["delta"] for event in made] == [
        {"role": "assistant", "reasoning_content": "H\u2028", "reasoning": "H\u2028"},
        {"reasoning_content": "m", "reasoning": "m", "content": "Yes"},
        {"content": "."},
        {},
    ]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    for asked, shown in (({}, True), ({"include_reasoning": False}, False)):
        whole = pb.OutputDelta(reasoning_content="Hm", finish_reason=pb.FINISH_REASON_LENGTH)
        answer = chat(**asked)
        made = json.loads("".join(await answer.whole("r", [message(whole, usage=used)])))
        found = made["choices"][0]["message"]
        assert found.get("reasoning_content") == found.get("reasoning") == ("Hm" if shown else None)
        assert found["content"] == (None if shown else "")
        assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_the_last_event_of_a_choice_has_no_words_but_an_end() -> None:
    answer = chat(stream=True, stop_token_ids=[2])
    answer.begin("r")
    text = await sent(answer, 0, message(pb.OutputDelta(text="a"), prompt=pb.PromptInfo()))
    text += await sent(answer, 0, message(pb.OutputDelta(text="")))  # half a character
    end = pb.OutputDelta(finish_reason=pb.FINISH_REASON_STOP, stop_token_id=2)
    text += await sent(answer, 0, message(end, usage=pb.Usage(prompt_tokens=1)))
    assert text.count("data: ") == 3
    first, half, last = events(text + answer.last_events())
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert half["choices"][0]["delta"] == {"content": ""}
    assert last["choices"][0]["delta"] == {}
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", 2)
    assert "usage" not in first
    assert {event["id"] for event in (first, half, last)} == {"chatcmpl-r"}


async def test_usage_is_the_last_event_and_null_before() -> None:
    answer = completion(stream=True, stream_options={"include_usage": True}, prompt=["a", "b"])
    answer.begin("r")
    text = ""
    for prompt in (0, 1):
        end = pb.OutputDelta(text="x", finish_reason=pb.FINISH_REASON_LENGTH)
        usage = pb.Usage(prompt_tokens=3, completion_tokens=2, cached_prompt_tokens=1)
        text += await sent(answer, prompt, message(end, prompt=pb.PromptInfo(), usage=usage))
    *pieces, last = events(text + answer.last_events())
    assert [piece["usage"] for piece in pieces] == [None, None]
    assert [piece["choices"][0]["index"] for piece in pieces] == [0, 1]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 4,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_text_that_breaks_careless_readers_of_lines_is_escaped() -> None:
    """Many clients split what they read with str.splitlines, which knows more line ends than SSE has."""
    nasty = 'a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh"\\\x00é\U0001f600'
    answer = completion(stream=True)
    answer.begin("r")
    text = await sent(answer, 0, message(pb.OutputDelta(text=nasty), prompt=pb.PromptInfo()))
    assert len(text.splitlines()) == 2
    assert events(text)[0]["choices"][0]["text"] == nasty


async def test_echoed_token_ids_are_decoded() -> None:
    answer = completion(prompt=[5, 6], echo=True, return_token_ids=True)
    output = pb.OutputDelta(text="!", token_ids=[9], finish_reason=pb.FINISH_REASON_LENGTH)
    made = await whole(answer, [message(output, prompt=pb.PromptInfo(token_ids=[5, 6]))])
    (choice,) = made["choices"]
    assert choice["text"] == "<5><6>!"
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [9])


async def test_a_prompt_alone_bills_no_output() -> None:
    answer = completion(max_tokens=0, echo=True, logprobs=0)
    info = pb.PromptInfo(logprobs=[token("hé"), token("llo", -1.5)])
    output = pb.OutputDelta(
        text=" there", logprobs=[token(" there", -1)], finish_reason=pb.FINISH_REASON_LENGTH
    )
    usage = pb.Usage(prompt_tokens=2, completion_tokens=1)
    made = await whole(answer, [message(output, prompt=info, usage=usage)])
    (choice,) = made["choices"]
    assert choice["text"] == "héllo"
    assert choice["logprobs"] == {
        "tokens": ["hé", "llo"],
        "token_logprobs": [None, -1.5],
        "top_logprobs": [None, {"llo": -1.5}],
        "text_offset": [0, 2],
    }
    assert made["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_token_after_a_prompt_alone_is_not_shown(stream: bool) -> None:
    """The end of sequence included: the prompt ended because nothing more was wanted."""
    answer = completion(max_tokens=0, echo=True, logprobs=0, return_token_ids=True, stream=stream)
    hidden = token(" there", -1)
    end = pb.OutputDelta(
        text=" there", token_ids=[9], logprobs=[hidden], finish_reason=pb.FINISH_REASON_STOP, stop_token_id=9
    )
    sent_message = message(end, prompt=pb.PromptInfo(token_ids=[5, 6]), usage=pb.Usage(prompt_tokens=2))
    if stream:
        answer.begin("r")
        choice = events(await sent(answer, 0, sent_message) + answer.last_events())[-1]["choices"][0]
        assert (choice["text"], choice["logprobs"]) == ("", None)
    else:
        (choice,) = (await whole(answer, [sent_message]))["choices"]
        assert choice["text"] == "héllo"
    assert choice["token_ids"] == []
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_tokens_that_are_no_text_are_told_apart() -> None:
    halves = [token("\ufffd", -1, b"\xe2\x96"), token("\ufffd", -2, b"\x81")]
    made = completion_logprobs([token("a", -0.5, top=halves), *halves], TextOffsets())
    assert made["tokens"] == ["a", "bytes:\\xe2\\x96", "bytes:\\x81"]
    assert made["top_logprobs"][0] == {"bytes:\\xe2\\x96": -1, "bytes:\\x81": -2, "a": -0.5}
    assert made["text_offset"] == [0, 1, 1]
    content = chat_logprobs(halves)["content"]
    assert [record["bytes"] for record in content] == [[0xE2, 0x96], [0x81]]


def test_of_tokens_with_the_same_text_the_likeliest_counts() -> None:
    top = [token("b", -0.25), token("a", -1), token("b", -2), token("a", -3)]
    (made,) = completion_logprobs([token("a", -3, top=top)], TextOffsets())["top_logprobs"]
    assert made == {"b": -0.25, "a": -1}


def test_no_infinity_gets_into_json() -> None:
    made = completion_logprobs([token("a", -math.inf)], TextOffsets())
    assert json.loads(json.dumps(made, allow_nan=False))["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("sampling.top_p", "top_p"),
        ("sampling.logit_bias[5]", "logit_bias[5]"),
        ("stopping.stop[3]", "stop[3]"),
        ("stopping.include_stop_in_output", "include_stop_str_in_output"),
        ("text", "prompt"),
        ("token_ids.ids[7]", "prompt[7]"),
        ("chat.messages[2].role", "messages[2].role"),
        ("chat.messages[2].tool_calls[0].arguments_json", "messages[2].tool_calls[0].function.arguments"),
        ("chat.tools[1].parameters_json_schema", "tools[1].function.parameters"),
        ("chat.tools[1].name", "tools[1].function.name"),
        ("chat.messages[2].tool_calls[0].name", "messages[2].tool_calls[0].function.name"),
        ("chat.messages[2].tool_calls[0].id", "messages[2].tool_calls[0].id"),
        ("chat.messages[2].name", "messages[2].name"),
        ("chat.tool_choice.name", "tool_choice.function.name"),
        ("chat.tool_choice.mode", "tool_choice"),
        ("cache.salt", "cache_salt"),
        ("stopping.max_tokens", "max_completion_tokens"),
        ("x-request-id", "x-request-id"),
        ("model", "model"),
    ],
)
def test_fields_have_the_names_that_clients_know(path: str, param: str) -> None:
    assert param_of(path, {"stopping.max_tokens": "max_completion_tokens"}) == param


def test_structure_in_all_its_spellings() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for members in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"response_format": {"type": "json_schema", "schema": schema}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"json_schema": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
    ):
        output = read_chat({**CHAT, **members}).builders[0].request.structured_output
        assert json.loads(output.json_schema) == schema
    for members in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        assert read_chat({**CHAT, **members}).builders[0].request.structured_output.json_object
    for members in ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}):
        output = read_completions({**COMPLETION, **members}).builders[0].request.structured_output
        assert list(output.choice.values) == ["a", "b"]
    for members in ({"guided_grammar": "root ::= x"}, {"ebnf": "root ::= x"}):
        output = read_completions({**COMPLETION, **members}).builders[0].request.structured_output
        assert output.ebnf_grammar == "root ::= x"
    assert (
        not read_chat({**CHAT, "response_format": {"type": "text"}})
        .builders[0]
        .request.HasField("structured_output")
    )


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
    ],
)
def test_a_constraint_is_called_as_the_client_wrote_it(members: dict[str, Any], param: str) -> None:
    """Also in what is found out later: that it cannot be compiled, or not be had beside a forced call."""
    (builder,) = read_chat({**CHAT, **members}).builders
    constraint = structured_output(builder.request.structured_output)
    assert constraint is not None
    assert param_of(constraint.path, builder.names) == param


def test_tools_and_their_turns() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    turns = [
        *CHAT["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    named = {"type": "function", "function": {"name": "f"}}
    members = {"messages": turns, "tools": [{"type": "function", "function": function}], "tool_choice": named}
    made = read_chat({**CHAT, **members}).builders[0].request.chat
    assert made.tools[0] == pb.Tool(name="f", description="d", parameters_json_schema='{"type": "object"}')
    assert made.messages[1].tool_calls[0] == pb.ToolCall(id="1", name="f", arguments_json="{}")
    assert (made.messages[2].role, made.messages[2].tool_call_id) == ("tool", "1")
    assert made.tool_choice == pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name="f")
    assert not read_chat({**CHAT, "tool_choice": "auto"}).builders[0].request.chat.HasField("tool_choice")
    for parallel in (None, True, False):
        asked = read_chat({**CHAT, "parallel_tool_calls": parallel, "tools": members["tools"]})
        choice = asked.builders[0].request.chat.tool_choice
        assert (choice.HasField("parallel") and not choice.parallel) is (parallel is False)
    for content, expected in ((None, ""), ("", ""), ("So:", "So:")):
        asked = read_chat({**CHAT, **members, "messages": [{**turns[1], "content": content}]})
        assert asked.builders[0].request.chat.messages[0].content == expected
    alone = read_chat({**CHAT, "parallel_tool_calls": False}).builders[0].request.chat
    assert not alone.HasField("tool_choice")


def test_beams_as_vllm_asks_for_them() -> None:
    asked = read_completions({**COMPLETION, "use_beam_search": True, "best_of": 4, "n": 2, "temperature": 0})
    sampling = asked.builders[0].request.sampling
    assert (sampling.beam_width, sampling.n) == (4, 2)
    assert not sampling.HasField("best_of")
    assert not sampling.HasField("temperature")
