"""Answers of ``/v1/chat/completions``: a message, or its pieces; of a tool call its name and id first.

Reasoning has the two names that clients read: ``reasoning_content``, which DeepSeek began with and most
servers have, and ``reasoning``, which OpenAI recommends and vLLM has instead since 2026.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final

from diptych.v1 import inference_pb2 as pb
from gateway.cooperative_yield import Yielder
from gateway.frontends.openai.answer import ChoicesAnswer, ids_inside, inside
from gateway.frontends.openai.logprobs import chat_logprobs_json
from gateway.frontends.openai.request_builder import HttpGenerateRequest

_REASONING: Final = ("reasoning_content", "reasoning")


class ChatAnswer(ChoicesAnswer):
    """Answer whose first piece of each choice has the role."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    event_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, asked: HttpGenerateRequest, *, model: str, fingerprint: str, created: int) -> None:
        super().__init__(asked, model=model, fingerprint=fingerprint, created=created)
        self._calls: dict[int, int] = {}  # tool calls so far, by choice; an entry means that it was opened
        self._prompt_ids = ""  # as JSON, without the brackets

    async def opening(self, prompt: int, info: pb.PromptInfo, turns: Yielder) -> list[list[str]]:
        self._prompt_ids = await ids_inside(info.token_ids, turns)
        return []

    async def event_choice(self, number: int, output: pb.OutputDelta, turns: Yielder) -> str:
        if not self._asked.reasoning:
            output.ClearField("reasoning_content")
        opens = number not in self._calls
        extra = ""
        if self._asked.token_ids:
            extra = f',"token_ids":[{await ids_inside(output.token_ids, turns)}]'
            if opens:
                extra += f',"prompt_token_ids":[{self._prompt_ids}]'
        logprobs = await chat_logprobs_json(output.logprobs, turns) if self._asked.logprobs else "null"
        return (
            f'{{"index":{number},"delta":{self._delta(number, output, opens)},"logprobs":{logprobs},'
            f"{self._event_ending(output)}{extra}}}"
        )

    async def whole_choice(
        self, number: int, prompt: int, info: pb.PromptInfo, output: pb.OutputDelta, turns: Yielder
    ) -> list[str]:
        if not self._asked.reasoning:
            output.ClearField("reasoning_content")
        # With calls and no text the content is null, as OpenAI has it; likewise with reasoning alone.
        content = output.text if output.text or not (output.tool_calls or output.reasoning_content) else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if output.reasoning_content:
            message |= dict.fromkeys(_REASONING, output.reasoning_content)
        if output.tool_calls:
            message["tool_calls"] = [_call(call) for call in output.tool_calls]
        logprobs = await chat_logprobs_json(output.logprobs, turns) if self._asked.logprobs else "null"
        pieces = [f'{{"index": {number}, "message": {json.dumps(message)}, "logprobs": ', logprobs]
        pieces.append(f", {inside(self._ending(output))}")
        if self._asked.token_ids:
            if not self._prompt_ids:
                self._prompt_ids = await ids_inside(info.token_ids, turns)
            pieces.append(f', "token_ids": [{await ids_inside(output.token_ids, turns)}]')
            pieces += [', "prompt_token_ids": [', self._prompt_ids, "]"]
        return [*pieces, "}"]

    def _delta(self, number: int, output: pb.OutputDelta, opens: bool) -> str:
        content = json.dumps(output.text)
        if not opens and not output.tool_calls and not output.reasoning_content:
            return f'{{"content":{content}}}' if output.text or not output.finish_reason else "{}"
        alone = not (output.tool_calls or output.reasoning_content)
        members = [f'"content":{content}'] if output.text or alone else []
        if output.reasoning_content:
            thoughts = json.dumps(output.reasoning_content)
            members[:0] = [f'"{name}":{thoughts}' for name in _REASONING]
        if opens:
            members.insert(0, '"role":"assistant"')
        sent = self._calls.get(number, 0)
        if output.tool_calls:
            pieces = []
            for call in output.tool_calls:
                sent += bool(call.id)
                pieces.append(_call_piece(sent - 1, call))
            members.append(f'"tool_calls":{json.dumps(pieces)}')
        self._calls[number] = sent
        return f"{{{','.join(members)}}}"


def _call_piece(index: int, call: pb.ToolCall) -> dict[str, Any]:
    """Return a call, or the further arguments of one, which has no id."""
    if not call.id:
        return {"index": index, "function": {"arguments": call.arguments_json}}
    return {"index": index, **_call(call)}


def _call(call: pb.ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_json},
    }
