"""Options of a call as plain Python values, and the request that they make."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from diptych.client.results import ToolCall
from diptych.parameters import PARAMETERS, GenerateOptions, Parameter, Texts
from diptych.v1 import inference_pb2 as pb

Schema = str | Mapping[str, Any]
"""A JSON schema, as text or as the object that it is."""


@dataclass(frozen=True)
class ImageUrl:
    """Address of an image that the server is to fetch, by http or https."""

    url: str


class Message(TypedDict, total=False):
    """Turn of a conversation: {"role": "user", "content": "…"}.

    A content with images is a list of texts and of the images' files, as bytes: ["What is this?", file]. In
    place of a file may be an `ImageUrl`, where the server fetches from its host.
    An assistant's turn may have the tool calls of an earlier answer, a tool's the id of the call it answers.
    """

    role: str
    content: str | Sequence[str | bytes | ImageUrl]
    name: str
    tool_calls: Sequence[ToolCall]
    tool_call_id: str
    reasoning_content: str


Prompt = str | Sequence[int] | Sequence[Message] | Sequence[Mapping[str, str]]
"""Text to be continued as it is, token ids, or the turns of a chat (the server applies the template)."""


@dataclass(frozen=True)
class Tool:
    """Function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Schema = ""


class Options(GenerateOptions, total=False):
    """Options of a call: the scalar ones of `diptych.parameters`, and what has a structure of its own."""

    # What answers must match: one of these
    json_schema: Schema
    json_object: bool
    regex: str
    grammar: str  # in llama.cpp's notation, GBNF
    choice: Texts
    # Of a chat only
    tools: Sequence[Tool]
    tool_choice: Literal["auto", "none", "required"] | Tool
    parallel_tool_calls: bool  # False: at most one
    add_generation_prompt: bool
    template_kwargs: Mapping[str, Any]


_CONSTRAINTS = frozenset(("json_schema", "json_object", "regex", "grammar", "choice"))
_CHAT = frozenset(("tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "template_kwargs"))
_GROUPS = ("sampling", "stopping", "response", "cache")
_CHOICE_MODES = {
    "auto": pb.ToolChoice.MODE_AUTO,
    "none": pb.ToolChoice.MODE_NONE,
    "required": pb.ToolChoice.MODE_REQUIRED,
}


def build_request(prompt: Prompt, model: str, options: Options) -> pb.GenerateRequest:
    """Build the request for a prompt.

    Raises TypeError for an option that does not exist, for two that exclude one another by their form, and
    for options of a chat where the prompt is none; TypeError or ValueError, with its name, for one whose
    value has no place in its field. All other values are the server's to judge.
    """
    given: dict[str, Any] = dict(options)
    if unknown := given.keys() - _CONSTRAINTS - _CHAT - PARAMETERS.keys():
        known = _CONSTRAINTS | _CHAT | PARAMETERS.keys()
        raise TypeError(f"unknown options: {', '.join(_explained(name, known) for name in sorted(unknown))}")
    request = pb.GenerateRequest(model=model)
    for group in _GROUPS:
        getattr(request, group).SetInParent()
    for name, value in given.items():
        if value is not None and (parameter := PARAMETERS.get(name)) is not None:
            _put(request, parameter, value)
    _set_constraint(request.structured_output, given)
    _set_prompt(request, prompt, given)
    return request


def _explained(name: str, known: Iterable[str]) -> str:
    """Return the name of an option that does not exist, with the one that may be meant."""
    if name == "model":
        return "model (it is an argument of the client: Client(address, model=…))"
    near = difflib.get_close_matches(name, tuple(known), n=1)
    return f"{name} ({near[0]}?)" if near else name


def _put(request: pb.GenerateRequest, parameter: Parameter, value: Any) -> None:
    """Set one field. The error of protobuf, which names no field, gets the name that the caller knows."""
    # A string is a sequence of its characters, which no caller means.
    texts = parameter.type is Texts and isinstance(value, str)
    try:
        parameter.put(request, [value] if texts else value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{parameter.name}: {error}") from None


def chat_prompt(turns: Sequence[Any], given: Mapping[str, Any]) -> pb.ChatPrompt:
    """Build a conversation with the options that shape it."""
    chat = pb.ChatPrompt(messages=[_turn(turn) for turn in turns])
    for tool in given.get("tools", ()):
        schema = _schema(tool.parameters)
        chat.tools.add(name=tool.name, description=tool.description, parameters_json_schema=schema)
    choice = given.get("tool_choice")
    if isinstance(choice, Tool):
        chat.tool_choice.mode, chat.tool_choice.name = pb.ToolChoice.MODE_NAMED, choice.name
    elif choice is not None:
        if choice not in _CHOICE_MODES:
            raise TypeError(f"tool_choice is one of {', '.join(_CHOICE_MODES)}, or a Tool")
        chat.tool_choice.mode = _CHOICE_MODES[choice]
    if "parallel_tool_calls" in given:
        chat.tool_choice.parallel = given["parallel_tool_calls"]
    if "add_generation_prompt" in given:
        chat.add_generation_prompt = given["add_generation_prompt"]
    chat.template_kwargs.update(dict(given.get("template_kwargs", {})))
    return chat


def is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt, given: Mapping[str, Any]) -> None:
    if not isinstance(prompt, str) and is_chat(prompt):
        request.chat.CopyFrom(chat_prompt(prompt, given))
        return
    if misplaced := _CHAT & given.keys():
        raise TypeError(f"options of a chat, and the prompt is none: {', '.join(sorted(misplaced))}")
    if isinstance(prompt, str):
        request.text = prompt
        return
    if not isinstance(prompt, Iterable):
        raise TypeError(f"prompt: a text, turns of a chat, or token ids, not {type(prompt).__name__}")
    ids: list[Any] = list(prompt)
    try:
        request.token_ids.ids.extend(ids)
    except (TypeError, ValueError) as error:
        raise type(error)(f"prompt: a text, turns of a chat, or token ids: {error}") from None
    request.token_ids.SetInParent()  # an empty prompt is the server's to refuse


def _turn(turn: Mapping[str, Any]) -> pb.ChatMessage:
    fields = dict(turn)
    calls = [
        pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
        for call in fields.pop("tool_calls", ())
    ]
    parts = () if isinstance(fields.get("content", ""), str) else map(_part, fields.pop("content"))
    return pb.ChatMessage(**fields, tool_calls=calls, parts=parts)


def _part(part: str | bytes | ImageUrl) -> pb.ContentPart:
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if isinstance(part, bytes):
        return pb.ContentPart(image=pb.Image(data=part))
    if isinstance(part, ImageUrl):
        return pb.ContentPart(image=pb.Image(url=part.url))
    raise TypeError("parts of a content are texts, files of images as bytes, and ImageUrl")


def _set_constraint(target: pb.StructuredOutput, given: Mapping[str, Any]) -> None:
    asked = sorted(_CONSTRAINTS & given.keys())
    if len(asked) > 1:
        raise TypeError(f"only one of these can be met at a time: {', '.join(asked)}")
    for name in asked:
        value = given[name]
        if name == "choice":
            target.choice.values.extend([value] if isinstance(value, str) else value)
            target.choice.SetInParent()
        elif name == "json_schema":
            target.json_schema = _schema(value)
        else:
            setattr(target, "ebnf_grammar" if name == "grammar" else name, value)


def _schema(schema: Schema) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
