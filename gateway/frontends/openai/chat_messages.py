"""The turns of a chat, with what tools there are, as ``pb.ChatPrompt``."""

from __future__ import annotations

import json
from typing import Final

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.request.json_members import Members, array, as_object, string

_TOOL_CHOICES: Final = {
    "none": pb.ToolChoice.MODE_NONE,
    "auto": pb.ToolChoice.MODE_AUTO,
    "required": pb.ToolChoice.MODE_REQUIRED,
}


def read_messages(body: Members, chat: pb.ChatPrompt) -> None:
    """Raises `InvalidParameter` or `UnsupportedFeature` with the path of the turn."""
    messages = body.required("messages", body.array("messages", limits.MAX_MESSAGES))
    for index, value in enumerate(messages):
        turn = as_object(f"messages[{index}]", value)
        _message(turn, chat.messages.add())
        turn.finish()


def read_tools(body: Members, chat: pb.ChatPrompt) -> None:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``."""
    for index, value in enumerate(body.array("tools", limits.MAX_JSON_LIST) or ()):
        tool = as_object(f"tools[{index}]", value)
        function = _function(tool)
        made = chat.tools.add(name=function.required("name", function.string("name")))
        made.description = function.string("description") or ""
        function.flag("strict")  # forced calls always hold to their schema
        parameters = function.raw("parameters")
        if parameters is not None:
            made.parameters_json_schema = _schema(function.path("parameters"), parameters)
        function.finish()
        tool.finish()
    _tool_choice(body, chat)
    if body.flag("parallel_tool_calls") is False and chat.tools:
        chat.tool_choice.parallel = False


def _message(turn: Members, message: pb.ChatMessage) -> None:
    message.role = turn.required("role", turn.string("role"))
    content = _content(turn)
    message.name = turn.string("name") or ""
    message.tool_call_id = turn.string("tool_call_id") or ""
    for index, value in enumerate(turn.array("tool_calls", limits.MAX_JSON_LIST) or ()):
        call = as_object(turn.path(f"tool_calls[{index}]"), value)
        function = _function(call)
        message.tool_calls.add(
            id=call.string("id") or "",
            name=function.required("name", function.string("name")),
            arguments_json=function.string("arguments") or "{}",
        )
        call.ignore("index")  # what a client kept of a stream
        function.finish()
        call.finish()
    # Calls may stand alone. Any other turn without words is a mistake, and as such refused by OpenAI.
    message.content = (content or "") if message.tool_calls else turn.required("content", content)
    turn.only("refusal")
    turn.only("audio")
    turn.only("annotations", [])
    turn.only("function_call")


def _content(turn: Members) -> str | None:
    """A string, or parts of text, which are put together as they are."""
    value = turn.take("content")
    path = turn.path("content")
    if value is None:
        return None
    if isinstance(value, str):
        return string(path, value)
    texts = []
    for index, given in enumerate(array(path, value, limits.MAX_JSON_LIST)):
        part = as_object(f"{path}[{index}]", given)
        if part.required("type", part.string("type")) != "text":
            raise UnsupportedFeature(part.path("type"), "must be text: this server reads nothing else")
        texts.append(part.required("text", part.string("text")))
        part.finish()
    return "".join(texts)


def _function(holder: Members) -> Members:
    if holder.string("type") not in (None, "function"):
        raise UnsupportedFeature(holder.path("type"), "must be function")
    return holder.required("function", holder.nested("function"))


def _schema(path: str, schema: dict[str, object]) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise InvalidParameter(path, "is nested too deeply") from error


def _tool_choice(body: Members, chat: pb.ChatPrompt) -> None:
    value = body.take("tool_choice")
    if value is None:
        return
    if isinstance(value, str):
        if value not in _TOOL_CHOICES:
            raise InvalidParameter("tool_choice", f"must be {', '.join(_TOOL_CHOICES)} or name a function")
        if value == "auto" and not chat.tools:
            return
        chat.tool_choice.mode = _TOOL_CHOICES[value]
        return
    choice = as_object("tool_choice", value)
    function = _function(choice)
    chat.tool_choice.mode = pb.ToolChoice.MODE_NAMED
    chat.tool_choice.name = function.required("name", function.string("name"))
    function.finish()
    choice.finish()
