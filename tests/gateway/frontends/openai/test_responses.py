"""`/v1/responses`: OpenAI's own client over real sockets, and items built from any pieces."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.errors import DiptychError
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.openai.responses_answer import _Items
from gateway.frontends.openai.responses_request import read_responses
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_routes import TEXT, gateway_api, ids_of, post, root
from tests.gateway.scripted_workers import ScriptedDecode, answering


async def test_a_text_is_answered_whole(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, client, decode):
        answer = await client.responses.create(
            model=bundled.card.name, input="Count:", instructions="Be brief.", metadata={"a": "b"}
        )
        (attach,) = await decode.wait_for("attach", 1)
    prompt = bundled.tokenizer.decode(list(attach.token_ids), False)
    assert "Be brief." in prompt
    assert "Count:" in prompt
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.output_text) == ("response", TEXT)
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(ids_of(bundled))
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_an_answer_cut_by_its_length_is_incomplete(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (_, client, _):
        answer = await client.responses.create(model=bundled.card.name, input="Count:", max_output_tokens=16)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]


async def test_a_stream_builds_the_same_response(bundled: ServedModel, redis_url: str) -> None:
    ended = answering([*ids_of(bundled), min(bundled.card.eos_token_ids)])
    async with gateway_api(bundled, redis_url, ended) as (_, client, _):
        async with client.responses.stream(model=bundled.card.name, input="Count:") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        whole = await client.responses.create(model=bundled.card.name, input="Count:")
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert (final.output_text, final.status) == (whole.output_text, whole.status) == (TEXT, "completed")
    assert final.usage == whole.usage


async def test_a_fault_after_the_first_event_is_an_error_event(bundled: ServedModel, redis_url: str) -> None:
    async def stuck(decode: ScriptedDecode, work: Any) -> None:
        decode.tokens(work, 0, ids_of(bundled)[:2])

    body = {"model": bundled.card.name, "input": "Count:", "stream": True}
    headers = {"Content-Type": "application/json", "x-request-timeout-ms": "2000"}
    async with (
        gateway_api(bundled, redis_url, stuck) as (stack, _, _),
        aiohttp.ClientSession() as session,
        session.post(f"{root(stack)}/v1/responses", data=json.dumps(body), headers=headers) as answer,
    ):
        lines = (await answer.text()).split("\n\n")
    events = [json.loads(line.partition("data: ")[2]) for line in lines if "data: " in line]
    assert events[0]["type"] == "response.created"
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "deadline_exceeded")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({}, "input", id="no-input"),
        pytest.param({"input": [{"type": "web_search_call"}]}, "input[0]", id="item"),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
            id="image",
        ),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[0].content[0].type",
            id="audio",
        ),
        pytest.param(
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "What?"},
                            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
                        ],
                    }
                ]
            },
            "input[0].content[1].image_url",
            id="image-for-a-model-of-text",
        ),
        pytest.param({"input": [{"role": "cook", "content": "x"}]}, "input[0].role", id="role"),
        pytest.param({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", id="stored"),
        pytest.param({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", id="tool"),
        pytest.param(
            {"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", id="tool-name"
        ),
        pytest.param(
            {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", id="format"
        ),
        pytest.param({"input": "x", "max_output_tokens": -1}, "max_output_tokens", id="tokens"),
        pytest.param({"input": "x", "temperature": -1}, "temperature", id="temperature"),
        pytest.param({"input": "x", "n": 2}, "n", id="choices"),
        pytest.param({"input": "x", "unheard_of": 1}, "unheard_of", id="unknown"),
    ],
)
async def test_a_fault_names_the_clients_member(
    bundled: ServedModel, redis_url: str, body: dict[str, Any], param: str
) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        status, answer, _ = await post(stack, "/v1/responses", {"model": bundled.card.name, **body})
    assert (status, answer["error"]["param"]) == (400, param)


def turns_of(items: list[dict[str, Any]]) -> list[pb.ChatMessage]:
    asked, _ = read_responses({"model": "m", "input": items})
    return list(asked.builders[0].request.chat.messages)


def test_items_of_one_response_are_one_turn() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output"}
    turns = turns_of(
        [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "r"}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {**call, "id": "fc_1", "status": "completed"},
            {**call, "call_id": "c2"},
            {**result, "call_id": "c1", "output": "1"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "2"}],
            },
            {"role": "assistant", "content": "c"},
            {"role": "assistant", "content": "d"},
        ]
    )
    assert [turn.role for turn in turns] == [
        *("developer", "user", "assistant", "tool", "tool", "assistant", "assistant")
    ]
    own = turns[2]
    assert (own.reasoning_content, own.content) == ("r", "b")
    assert [call.id for call in own.tool_calls] == ["c1", "c2"]
    assert [(turn.tool_call_id, turn.content) for turn in turns[3:5]] == [("c1", "1"), ("c2", "2")]


def test_a_choice_of_tools_reaches_the_core() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]
    asked, _ = read_responses(
        {"model": "m", "input": "x", "tools": tools, "tool_choice": {"type": "function", "name": "f"}}
    )
    chat = asked.builders[0].request.chat
    assert (chat.tool_choice.mode, chat.tool_choice.name) == (pb.ToolChoice.MODE_NAMED, "f")
    assert json.loads(chat.tools[0].parameters_json_schema) == {"type": "object"}
    with pytest.raises(DiptychError):
        read_responses({"model": "m", "input": "x", "tool_choice": "sometimes"})


PIECES = st.lists(
    st.one_of(
        st.builds(lambda text: {"text": text}, st.text(min_size=1, max_size=5)),
        st.builds(lambda text: {"reasoning_content": text}, st.text(min_size=1, max_size=5)),
        st.builds(
            lambda number, text: {
                "tool_calls": [pb.ToolCall(id=f"c{number}", name="f", arguments_json=text)]
            },
            st.integers(0, 99),
            st.text(max_size=5),
        ),
    ),
    min_size=1,
    max_size=12,
)


@given(PIECES)
def test_events_of_any_pieces_build_the_complete_items(pieces: list[dict[str, Any]]) -> None:
    items, built = _Items(), dict[int, dict[str, Any]]()
    outputs = [pb.OutputDelta(**piece) for piece in pieces]
    outputs.append(pb.OutputDelta(finish_reason=pb.FINISH_REASON_STOP))
    for output in outputs:
        for event in items.add(output):
            _apply(event, built)
    assert [built[index]["text"] for index in range(len(built))] == [
        _text_of(item) for item in items.complete
    ]
    assert all(item["status"] == "completed" for item in items.complete)
    assert len({item["id"] for item in items.complete}) == len(items.complete)


def _apply(event: dict[str, Any], built: dict[int, dict[str, Any]]) -> None:
    index = event["output_index"]
    if event["type"] == "response.output_item.added":
        assert index == len(built)
        assert all("done" in other for other in built.values())
        built[index] = {"text": "", "id": event["item"]["id"]}
    elif event["type"].endswith(".delta"):
        assert event["item_id"] == built[index]["id"]
        built[index]["text"] += event["delta"]
    elif event["type"] == "response.output_item.done":
        built[index]["done"] = True
        assert _text_of(event["item"]) == built[index]["text"]


def _text_of(item: dict[str, Any]) -> str:
    text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    assert isinstance(text, str)
    return text
