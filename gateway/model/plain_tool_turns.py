"""Tools for chat templates without them: in words of the system turn, calls and results as plain turns.

The form of a call is `gateway.tools.generic_json`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gateway.model.chat_template import Message
from gateway.tools.tool import Tool, ToolCall

_OFFER: Final = """You can call these functions, given as JSON, one a line:
{functions}

To call a function, answer with one JSON object and nothing else:
{{"name": "the function's name", "arguments": {{an object that matches its parameters}}}}
Else answer in plain text."""


def plain_tool_turns(
    messages: Sequence[Message], tools: Sequence[Tool], *, system: bool, calls: bool
) -> list[Message]:
    """Return the conversation with its tools in words.

    Args:
        messages: of the conversation.
        tools: that are offered.
        system: the template renders a system turn at the start; else the first user turn has the tools.
        calls: the template renders calls and their results, which stay as they are.
    """
    turns = list(messages) if calls else _plain(messages)
    if not tools:
        return turns
    functions = (tool.as_template_value()["function"] for tool in tools)
    offer = _OFFER.format(functions="\n".join(json.dumps(one, ensure_ascii=False) for one in functions))
    role = "system" if system else "user"
    if turns and turns[0].role == role:
        return [replace(turns[0], content=f"{turns[0].content}\n\n{offer}"), *turns[1:]]
    return [Message(role, offer), *turns]


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Return calls as the JSON that the model wrote, and results as turns of the user.

    Many templates want user and assistant to alternate: results and the user's words after them are one turn.
    """
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id}
    turns: list[Message] = []
    of_results = False  # the last turn
    for message in messages:
        if message.tool_calls:
            written = [
                f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {_arguments(call)}}}'
                for call in message.tool_calls
            ]
            content = "\n".join([message.content, *written] if message.content else written)
            message = replace(message, content=content, tool_calls=())
        result = message.role == "tool"
        if result:
            name = message.name or names.get(message.tool_call_id, "")
            label = f"Result of {name}" if name else "Result"
            message = Message("user", f"{label}: {message.content}")
        if of_results and message.role == "user":
            turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n{message.content}")
        else:
            turns.append(message)
            of_results = result
    return turns


def _arguments(call: ToolCall) -> str:
    """Return the arguments as they were written; what is no JSON object becomes a JSON string."""
    arguments = call.arguments
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, str) else call.arguments_json
