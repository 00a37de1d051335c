"""Answers of ``/v1/responses``: items of output, whole or as events that build them.

An output is a list of items, each complete before the next begins: reasoning, a message, calls. `_Items`
turns the core's pieces into items and events; the whole answer is made of the same items.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from diptych.v1 import inference_pb2 as pb
from gateway.frontends.openai.answer import Answer
from gateway.frontends.openai.request_builder import HttpGenerateRequest
from gateway.frontends.openai.responses_bodies import ResponsesMembers

_ENDED: Final = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_TOOL_CALLS)
Event = dict[str, Any]


@dataclass(slots=True)
class _Open:
    """Item that is not complete: a message, reasoning or a call, with its text or arguments so far."""

    kind: str
    item_id: str
    text: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    def as_object(self, status: str) -> dict[str, Any]:
        text = "".join(self.text)
        shared = {"id": self.item_id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**shared, "call_id": self.call_id, "name": self.name, "arguments": text}
        content = [self.part(text)] if text or status != "in_progress" else []
        if self.kind == "reasoning":
            return {**shared, "summary": [], "content": content}
        return {**shared, "role": "assistant", "content": content}

    def part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Items:
    """Items of one output, built from its pieces."""

    def __init__(self) -> None:
        self.complete: list[dict[str, Any]] = []
        self._open: _Open | None = None

    def add(self, output: pb.OutputDelta) -> list[Event]:
        """Add a piece; return the events that tell of it."""
        events: list[Event] = []
        if output.reasoning_content:
            events += self._add_text("reasoning", "rs", output.reasoning_content)
        if output.text:
            events += self._add_text("message", "msg", output.text)
        for call in output.tool_calls:
            events += self._add_call(call)
        if output.finish_reason:
            events += self.close("completed" if output.finish_reason in _ENDED else "incomplete")
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """Complete the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        index, text = len(self.complete), "".join(item.text)
        at = {"item_id": item.item_id, "output_index": index}
        self.complete.append(made := item.as_object(status))
        done = {"type": "response.output_item.done", "output_index": index, "item": made}
        if item.kind == "function_call":
            arguments = {"type": "response.function_call_arguments.done", **at, "arguments": text}
            return [{**arguments, "name": item.name}, done]
        part = item.part(text)
        return [
            {"type": f"response.{part['type']}.done", **at, "content_index": 0, **_texts(item, "text", text)},
            {"type": "response.content_part.done", **at, "content_index": 0, "part": part},
            done,
        ]

    def _add_text(self, kind: str, prefix: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events = [*self.close(), *self._begin(_Open(kind, f"{prefix}_{secrets.token_hex(12)}"))]
        item = self._open
        if item is None:
            raise RuntimeError("no item was begun")
        item.text.append(text)
        at = {"item_id": item.item_id, "output_index": len(self.complete), "content_index": 0}
        kind_of_text = item.part("")["type"]
        events.append({"type": f"response.{kind_of_text}.delta", **at, **_texts(item, "delta", text)})
        return events

    def _add_call(self, call: pb.ToolCall) -> list[Event]:
        events: list[Event] = []
        if call.id:
            made = _Open("function_call", f"fc_{secrets.token_hex(12)}", call_id=call.id, name=call.name)
            events = [*self.close(), *self._begin(made)]
        if self._open is None:
            raise RuntimeError("arguments of no call")
        if call.arguments_json:
            self._open.text.append(call.arguments_json)
            at = {"item_id": self._open.item_id, "output_index": len(self.complete)}
            delta = {"type": "response.function_call_arguments.delta", **at, "delta": call.arguments_json}
            events.append(delta)
        return events

    def _begin(self, item: _Open) -> list[Event]:
        self._open, index = item, len(self.complete)
        begun = item.as_object("in_progress")
        events: list[Event] = [{"type": "response.output_item.added", "output_index": index, "item": begun}]
        if item.kind != "function_call":
            at = {"item_id": item.item_id, "output_index": index, "content_index": 0}
            events.append({"type": "response.content_part.added", **at, "part": item.part("")})
        return events


def _texts(item: _Open, name: str, text: str) -> dict[str, Any]:
    return {name: text} if item.kind == "reasoning" else {name: text, "logprobs": []}


class ResponsesAnswer(Answer):
    """Answer in items; a stream's events have numbers, and none says ``[DONE]``."""

    def __init__(
        self, asked: HttpGenerateRequest, body: ResponsesMembers, *, model: str, created: int
    ) -> None:
        super().__init__(asked, model=model, created=created)
        self._body = body
        self._items = _Items()
        self._number_of_event = 0
        self._id = ""
        self._reason = pb.FINISH_REASON_UNSPECIFIED

    def id_of(self, request_id: str) -> str:
        return f"resp_{request_id}"

    def begin(self, request_id: str) -> None:
        self._id = self.id_of(request_id)

    async def events(self, prompt: int, message: pb.GenerateResponse) -> list[list[str]]:
        events: list[Event] = []
        if not self._number_of_event:
            begun = self._response("in_progress")
            events = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
        if message.HasField("usage"):
            self._add(message.usage)
        for output in message.outputs:
            self._reason = output.finish_reason or self._reason
            events += self._items.add(output)
        return [[self._written(event)] for event in events]

    def last_events(self) -> str:
        status = "completed" if self._reason in _ENDED else "incomplete"
        return self._written({"type": f"response.{status}", "response": self._response(status)})

    def error_event(self, error: dict[str, Any]) -> str:
        fault = error["error"]
        told = {"code": fault["code"], "message": fault["message"], "param": fault["param"]}
        return self._written({"type": "error", **told})

    async def whole(self, request_id: str, messages: Sequence[pb.GenerateResponse]) -> list[str]:
        self.begin(request_id)
        for message in messages:
            self._add(message.usage)
            for output in message.outputs:
                self._reason = output.finish_reason
                self._items.add(output)
        status = "completed" if self._reason in _ENDED else "incomplete"
        return [json.dumps(self._response(status))]

    def _written(self, event: Event) -> str:
        kind = event["type"]
        numbered = {**event, "sequence_number": self._number_of_event}
        self._number_of_event += 1
        return f"event: {kind}\ndata: {json.dumps(numbered)}\n\n"

    def _response(self, status: str) -> dict[str, Any]:
        body, ended = self._body, status != "in_progress"
        shown = body.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": list(self._items.complete) if ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": shown.get("reasoning", {"effort": None}),
            "store": False,
            "temperature": shown.get("temperature"),
            "text": shown.get("text", {"format": {"type": "text"}}),
            "tool_choice": shown.get("tool_choice", "auto"),
            "tools": [tool.model_dump(mode="json") for tool in body.tools or ()],
            "top_p": shown.get("top_p"),
            "truncation": "disabled",
            "usage": self._usage_object() if ended else None,
        }

    def _usage_object(self) -> dict[str, Any]:
        total = self._usage
        return {
            "input_tokens": total.prompt_tokens,
            "input_tokens_details": {"cached_tokens": total.cached_prompt_tokens, "cache_write_tokens": 0},
            "output_tokens": total.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": total.reasoning_tokens},
            "total_tokens": total.prompt_tokens + total.completion_tokens,
        }
