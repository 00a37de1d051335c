"""Checks of a conversation's tools, of the choice among them, and of the calls in its turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.runtime.grammar.grammar import Grammar, Kind
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.model.tool_support import ToolSupport
from gateway.request.field_checks import has_name_characters
from gateway.request.structured_output import Constraint, check_depth, check_size, lenient_schema, read_schema
from gateway.tools.tool import Mode, Tool, Toolbox, ToolCall

# Control tokens are spelled with these, and the id of a tool's turn goes through the template as it is.
_BRACKETS: Final = frozenset("<>[]")
_MODES: Final = {
    pb.ToolChoice.MODE_UNSPECIFIED: Mode.AUTO,
    pb.ToolChoice.MODE_AUTO: Mode.AUTO,
    pb.ToolChoice.MODE_NONE: Mode.NONE,
    pb.ToolChoice.MODE_REQUIRED: Mode.REQUIRED,
    pb.ToolChoice.MODE_NAMED: Mode.NAMED,
}


def toolbox(chat: pb.ChatPrompt, support: ToolSupport) -> Toolbox | None:
    """Return the tools and how they are to be used; None if there are none.

    Raises `InvalidParameter` or `UnsupportedFeature`.
    """
    choice = chat.tool_choice
    mode = _MODES.get(choice.mode)
    if mode is None:
        raise InvalidParameter("chat.tool_choice.mode", "is not known")
    if not chat.tools:
        if mode in (Mode.REQUIRED, Mode.NAMED):
            raise InvalidParameter("chat.tool_choice", "needs tools to choose from")
        return None
    if support.generic and mode is Mode.NONE:
        return None
    if not (support.tools or support.generic):
        raise UnsupportedFeature("chat.tools", "this model's chat template has no tools")
    if support.call_format is None and mode is not Mode.NONE:
        raise UnsupportedFeature("chat.tools", "the form of this model's calls is not known to this server")
    tools = _tools(chat.tools)
    if mode is Mode.NAMED and choice.name not in {tool.name for tool in tools}:
        raise InvalidParameter("chat.tool_choice.name", "must be the name of one of the tools")
    single = choice.HasField("parallel") and not choice.parallel
    return Toolbox(tools, mode, choice.name if mode is Mode.NAMED else "", single)


def constraint_of(
    tools: Toolbox | None,
    support: ToolSupport,
    asked: Constraint | None,
    *,
    lenient: bool = False,
    begun: bool = True,
) -> Constraint | None:
    """Return what the output must match: required calls, else what was ``asked`` beside the tools.

    Args:
        tools: of the request.
        support: of the model.
        asked: from `structured_output`.
        lenient: as in `structured_output`.
        begun: the prompt ends with the text that begins required calls, where the model's format has one.
    """
    if tools is None or support.call_format is None:
        return asked
    if lenient:
        tools = replace(tools, tools=tuple(map(_lenient, tools.tools)))
    if not tools.forced:
        optional = support.call_format.optional_grammar
        if optional is None or asked is not None or tools.mode is Mode.NONE:
            return asked
        return Constraint("chat.tools", optional(tools.tools), _parts(tools), optional=True)
    if asked is not None:
        raise InvalidParameter(asked.path, "cannot be had beside a tool choice that makes the output a call")
    many = tools.mode is Mode.REQUIRED and not tools.single
    grammar = support.grammar(tools.callable, many=many, begun=begun)
    return Constraint("chat.tool_choice", grammar, _parts(tools))


def _parts(tools: Toolbox) -> tuple[tuple[str, Grammar], ...]:
    """Return the grammars of the tools' arguments, each with the field of its schema."""
    return tuple(
        (
            f"chat.tools[{index}].parameters_json_schema",
            Grammar(Kind.JSON_SCHEMA, json.dumps(dict(tool.arguments_schema))),
        )
        for index, tool in enumerate(tools.tools)
        if tools.name in ("", tool.name)
    )


def _lenient(tool: Tool) -> Tool:
    return replace(tool, parameters=lenient_schema(tool.arguments_schema))


def tool_calls(path: str, message: pb.ChatMessage, support: ToolSupport) -> tuple[ToolCall, ...]:
    """Return the calls of an assistant's turn. Raises InvalidParameter or UnsupportedFeature."""
    if not message.tool_calls:
        return ()
    if message.role != "assistant":
        raise InvalidParameter(f"{path}.tool_calls", "are an assistant's")
    if not (support.calls or support.generic):
        raise UnsupportedFeature(f"{path}.tool_calls", "this model's chat template has no tool calls")
    if len(message.tool_calls) > limits.MAX_TOOL_CALLS:
        raise InvalidParameter(f"{path}.tool_calls", f"must be at most {limits.MAX_TOOL_CALLS}")
    return tuple(_call(f"{path}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls))


def tool_call_id(path: str, message: pb.ChatMessage, support: ToolSupport) -> str:
    """Return the call that a tool's turn answers; may be left out where the template does not read it."""
    if message.role == "tool" and not (support.turns or support.generic):
        raise UnsupportedFeature(f"{path}.role", "this model's chat template has no tool turns")
    if message.tool_call_id and message.role != "tool":
        raise InvalidParameter(f"{path}.tool_call_id", "is a tool's")
    return _label(f"{path}.tool_call_id", message.tool_call_id)


def _tools(given: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    if len(given) > limits.MAX_TOOLS:
        raise InvalidParameter("chat.tools", f"must be at most {limits.MAX_TOOLS}")
    if sum(one.ByteSize() for one in given) > limits.MAX_PROMPT_BYTES:  # before any schema is read
        raise InvalidParameter("chat.tools", f"must be at most {limits.MAX_PROMPT_BYTES} bytes together")
    tools: dict[str, Tool] = {}
    for index, one in enumerate(given):
        path = f"chat.tools[{index}]"
        name = _name(f"{path}.name", one.name)
        if name in tools:
            raise InvalidParameter(f"{path}.name", "must differ from the other tools' names")
        schema = _parameters(f"{path}.parameters_json_schema", one.parameters_json_schema or "{}")
        tools[name] = Tool(name, one.description, schema)
    return tuple(tools.values())


def _parameters(path: str, text: str) -> dict[str, object]:
    """Return the schema of a tool's arguments, which are an object. Raises InvalidParameter."""
    check_size(path, text)
    schema = read_schema(path, text)
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise InvalidParameter(path, "must be the schema of an object")
    return schema


def _call(path: str, call: pb.ToolCall) -> ToolCall:
    arguments = call.arguments_json or "{}"
    check_size(f"{path}.arguments_json", arguments)
    check_depth(f"{path}.arguments_json", arguments)
    if not call.name:
        raise InvalidParameter(f"{path}.name", "must not be empty")
    return ToolCall(_label(f"{path}.name", call.name), arguments, _label(f"{path}.id", call.id))


def _name(path: str, name: str) -> str:
    if not 0 < len(name) <= limits.MAX_TOOL_NAME_CHARS or not has_name_characters(name):
        raise InvalidParameter(
            path, f"must be 1 to {limits.MAX_TOOL_NAME_CHARS} letters, digits, dots, dashes and underscores"
        )
    return name


def _label(path: str, given: str) -> str:
    """Check an id, maybe another server's, or the name of a called function, maybe made up."""
    if len(given) > limits.MAX_TOOL_CALL_ID_CHARS or not given.isprintable() or _BRACKETS.intersection(given):
        raise InvalidParameter(
            path,
            f"must be at most {limits.MAX_TOOL_CALL_ID_CHARS} printable characters without <, >, [ and ]",
        )
    return given
