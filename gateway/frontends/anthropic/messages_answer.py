"""Answers of ``/v1/messages``: content blocks, whole or as the events that build them.

Each block is complete before the next begins: thinking, text, calls. `_Blocks` turns the core's pieces into
blocks and events; the whole answer is made of the same blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from diptych.v1 import inference_pb2 as pb
from gateway.frontends.anthropic.errors import anthropic_error
from gateway.frontends.openai.answer import Answer
from gateway.frontends.openai.request_builder import HttpGenerateRequest

REQUEST_ID: Final = "request-id"
# What cuts an answer is max_tokens in Anthropic's words, whichever limit it was.
_STOP_REASONS: Final[Mapping[int, str]] = {
    pb.FINISH_REASON_STOP: "end_turn",
    pb.FINISH_REASON_TOOL_CALLS: "tool_use",
}
_CUT: Final = "max_tokens"
# Clients drop thinking without a signature from their history. Nothing is signed, and none is checked.
_SIGNATURE: Final = "unsigned"
Event = dict[str, Any]


@dataclass(slots=True)
class _Open:
    """Block that is not complete, with its text or the JSON of its input so far."""

    kind: str
    text: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    def as_object(self) -> dict[str, Any]:
        text = "".join(self.text)
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": _SIGNATURE if text else ""}
        if self.kind == "text":
            return {"type": "text", "text": text}
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": _input(text)}

    def delta(self, text: str) -> dict[str, Any]:
        if self.kind == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.kind}_delta", self.kind: text}


def _input(text: str) -> dict[str, Any]:
    """Return a call's input; of a call that the length cut it is empty, and the stop reason says so."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _Blocks:
    """Content blocks of one answer, built from its pieces."""

    def __init__(self, thinking: bool) -> None:
        self.complete: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._thinking = thinking

    def add(self, output: pb.OutputDelta) -> list[Event]:
        """Add a piece; return the events that tell of it."""
        events: list[Event] = []
        if output.reasoning_content and self._thinking:
            events += self._add_text("thinking", output.reasoning_content)
        if output.text:
            events += self._add_text("text", output.text)
        for call in output.tool_calls:
            if call.id:
                events += self._begin(_Open("tool_use", call_id=call.id, name=call.name))
            if call.arguments_json:
                events += self._add_piece(call.arguments_json)
        if output.finish_reason:
            events += self._close()
        return events

    def _add_text(self, kind: str, text: str) -> list[Event]:
        begun = [] if self._open is not None and self._open.kind == kind else self._begin(_Open(kind))
        return [*begun, *self._add_piece(text)]

    def _add_piece(self, text: str) -> list[Event]:
        if self._open is None:
            raise RuntimeError("a piece of no block")
        self._open.text.append(text)
        at = {"type": "content_block_delta", "index": len(self.complete)}
        return [{**at, "delta": self._open.delta(text)}]

    def _begin(self, block: _Open) -> list[Event]:
        events = self._close()
        self._open = block
        start = {"type": "content_block_start", "index": len(self.complete)}
        return [*events, {**start, "content_block": block.as_object()}]

    def _close(self) -> list[Event]:
        """Complete the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        index = len(self.complete)
        self.complete.append(block.as_object())
        events: list[Event] = [{"type": "content_block_stop", "index": index}]
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            events.insert(0, {"type": "content_block_delta", "index": index, "delta": signature})
        return events


class MessagesAnswer(Answer):
    """Answer in content blocks."""

    id_headers: ClassVar[tuple[str, ...]] = (*Answer.id_headers, REQUEST_ID)

    def __init__(self, asked: HttpGenerateRequest, *, model: str, created: int) -> None:
        super().__init__(asked, model=model, created=created)
        self._blocks = _Blocks(asked.reasoning)
        self._id = ""
        self._begun = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def id_of(self, request_id: str) -> str:
        return f"msg_{request_id}"

    def begin(self, request_id: str) -> None:
        self._id = self.id_of(request_id)

    async def events(self, prompt: int, message: pb.GenerateResponse) -> list[list[str]]:
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            head = pb.Usage(
                prompt_tokens=message.prompt.token_count,
                cached_prompt_tokens=message.prompt.cached_token_count,
            )
            events.append({"type": "message_start", "message": self._message(head, ended=False)})
        if message.HasField("usage"):
            self._add(message.usage)
        events += self._add_outputs(message)
        return [[_written(event)] for event in events]

    def last_events(self) -> str:
        ending = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        last = {"type": "message_delta", "delta": ending, "usage": _usage_object(self._usage)}
        return _written(last) + _written({"type": "message_stop"})

    def error_event(self, error: dict[str, Any]) -> str:
        return _written(anthropic_error(error))

    async def whole(self, request_id: str, messages: Sequence[pb.GenerateResponse]) -> list[str]:
        self.begin(request_id)
        for message in messages:
            self._add(message.usage)
            self._add_outputs(message)
        return [json.dumps(self._message(self._usage, ended=True))]

    def _add_outputs(self, message: pb.GenerateResponse) -> list[Event]:
        events: list[Event] = []
        for output in message.outputs:
            events += self._blocks.add(output)
            if output.finish_reason:
                self._stop_reason = _STOP_REASONS.get(output.finish_reason, _CUT)
                if output.stop_text and self._stop_reason == "end_turn":
                    self._stop_reason, self._stop_sequence = "stop_sequence", output.stop_text
        return events

    def _message(self, usage: pb.Usage, *, ended: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks.complete) if ended else [],
            "stop_reason": self._stop_reason if ended else None,
            "stop_sequence": self._stop_sequence if ended else None,
            "usage": _usage_object(usage),
        }


def _written(event: Event) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _usage_object(total: pb.Usage) -> dict[str, Any]:
    """Return the usage. Cached tokens are not part of Anthropic's input tokens: the sum is the prompt."""
    usage: dict[str, Any] = {
        "input_tokens": total.prompt_tokens - total.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": total.cached_prompt_tokens,
        "output_tokens": total.completion_tokens,
    }
    if total.reasoning_tokens:
        usage["output_tokens_details"] = {"thinking_tokens": total.reasoning_tokens}
    return usage
