"""`/v1/messages` through the whole system, by sockets: a call and its result, streams, a schema, counts."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.end_to_end.stack import http_root
from tests.end_to_end.tiny_system import MODEL, Served

CLOCK = {
    "name": "now",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
QUESTION = {"role": "user", "content": "What time is it?"}
FORCED = {
    "tools": [CLOCK],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "temperature": 1.0,
    "seed": 3,
}


def ask(served: Served, path: str, **members: Any) -> Any:
    """Return the JSON of an answer, or the text of a stream."""
    body = {"model": MODEL, "messages": [QUESTION], **members}
    request = urllib.request.Request(
        f"{http_root(served.stack)}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "anthropic-version": "2023-06-01", "x-api-key": "any"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return text if members.get("stream") else json.loads(text)


def test_forced_call_and_its_result_make_a_second_turn(served: Served) -> None:
    first = ask(served, "/v1/messages", max_tokens=400, **FORCED)
    (call,) = [block for block in first["content"] if block["type"] == "tool_use"]
    assert (first["stop_reason"], call["name"]) == ("tool_use", "now")
    assert call["input"]["zone"] in ("UTC", "CET")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "noon"}
    history = [
        QUESTION,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    asked: dict[str, Any] = {"messages": history, "tools": [CLOCK]}
    second = ask(served, "/v1/messages", max_tokens=8, tool_choice={"type": "none"}, **asked)
    assert second["content"]
    counted = ask(served, "/v1/messages/count_tokens", **asked)["input_tokens"]
    usage = second["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_streamed_call_is_the_whole_one(served: Served) -> None:
    whole = ask(served, "/v1/messages", max_tokens=400, **FORCED)
    lines = ask(served, "/v1/messages", max_tokens=400, stream=True, **FORCED).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    inputs = "".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta")
    (call,) = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert json.loads(inputs) == call["input"]
    assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == [
        "tool_use"
    ]
    assert events[-1]["type"] == "message_stop"


def test_schema_is_kept(served: Served) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(served, "/v1/messages", max_tokens=400, output_config=form, temperature=1.0, seed=1)
    assert isinstance(json.loads(answer["content"][0]["text"])["ok"], bool)
