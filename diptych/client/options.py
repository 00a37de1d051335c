"""What a caller asks for, as plain Python values, and the request that it becomes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar

from google.protobuf import duration_pb2
from google.protobuf.message import Message as ProtobufMessage

from diptych.client.results import ToolCall
from diptych.v1 import inference_pb2 as pb

M = TypeVar("M", bound=ProtobufMessage)

Schema = str | Mapping[str, Any]
"""A JSON schema, as text or as the object that it is."""

Texts = str | Sequence[str]
"""Several texts, or a single one as it is."""


class Message(TypedDict, total=False):
    """One turn of a conversation: {"role": "user", "content": "…"}.

    An assistant's turn may have the tool calls of an earlier answer, a tool's says which one it answers.
    """

    role: str
    content: str
    name: str
    tool_calls: Sequence[ToolCall]
    tool_call_id: str


Prompt = str | Sequence[int] | Sequence[Message] | Sequence[Mapping[str, str]]
"""Text to be continued as it is, token ids, or the turns of a chat (the server applies the template)."""


@dataclass(frozen=True)
class Tool:
    """What the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Schema = ""


class Options(TypedDict, total=False):
    """What a caller may set; an absent key means the model's own default, 0 is a real 0."""

    # How tokens are chosen
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Texts
    # How many answers
    n: int
    best_of: int
    beam_width: int
    # Where they end
    max_tokens: int
    min_tokens: int
    stop: Texts
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    time_limit_s: float  # what was written by then is the answer; `timeout_s` of a call is the hard limit
    # What they must match: one of these
    json_schema: Schema
    json_object: bool
    regex: str
    grammar: str  # in llama.cpp's notation, GBNF
    choice: Texts
    # What is told
    logprobs: int  # alternatives beside each token; 0 = the token's own only
    prompt_logprobs: int
    echo: bool  # the prompt's token ids as well
    return_text: bool
    return_token_ids: bool
    skip_special_tokens: bool
    stream_interval: int  # a message every so many tokens
    timings: bool
    # Of a chat only
    tools: Sequence[Tool]
    tool_choice: Literal["auto", "none", "required"] | Tool
    parallel_tool_calls: bool  # False: at most one
    add_generation_prompt: bool
    template_kwargs: Mapping[str, Any]
    # The request itself
    priority: int  # higher runs earlier
    session_id: str
    request_id: str
    cache_salt: str
    bypass_cache_read: bool
    bypass_cache_write: bool


# The fields of each message of the protocol, by the option that sets them.
_SAMPLING = {
    name: name
    for name in (
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "beam_width"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("logit_bias", "allowed_token_ids", "bad_words"),
    )
}
_STOPPING = {
    name: name
    for name in (
        *("max_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("ignore_eos", "include_stop_in_output"),
    )
}
_RESPONSE = {
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "echo": "echo_prompt",
    "return_text": "text",
    "return_token_ids": "token_ids",
    "skip_special_tokens": "skip_special_tokens",
    "stream_interval": "stream_interval",
    "timings": "timings",
}
_CACHE = {"cache_salt": "salt", "bypass_cache_read": "bypass_read", "bypass_cache_write": "bypass_write"}
_REQUEST = {name: name for name in ("priority", "session_id", "request_id")}
_CONSTRAINTS = frozenset(("json_schema", "json_object", "regex", "grammar", "choice"))
_TEXTS = frozenset(("bad_words", "stop", "choice"))
_CHAT = frozenset(("tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "template_kwargs"))
_TIME_LIMIT = "time_limit_s"
_CHOICE_MODES = {
    "auto": pb.ToolChoice.MODE_AUTO,
    "none": pb.ToolChoice.MODE_NONE,
    "required": pb.ToolChoice.MODE_REQUIRED,
}


def build_request(prompt: Prompt, model: str, options: Options) -> pb.GenerateRequest:
    """The request for a prompt.

    Raises TypeError for an option that does not exist, for two that exclude one another by their form, and
    for options of a chat where the prompt is none; TypeError or ValueError, with its name, for one whose
    value has no place in its field. All other values are the server's to judge.
    """
    given: dict[str, Any] = dict(options)
    # A string is a sequence of its characters, which nobody means.
    given |= {name: [given[name]] for name in _TEXTS if isinstance(given.get(name), str)}
    plain = (_SAMPLING, _STOPPING, _RESPONSE, _CACHE, _REQUEST)
    unknown = given.keys() - _CONSTRAINTS - _CHAT - {_TIME_LIMIT} - set().union(*plain)
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = pb.GenerateRequest(
        model=model,
        sampling=_filled(pb.SamplingParams, given, _SAMPLING),
        stopping=_filled(pb.StoppingCriteria, given, _STOPPING),
        response=_filled(pb.ResponseOptions, given, _RESPONSE),
        cache=_filled(pb.CacheOptions, given, _CACHE),
    )
    request.MergeFrom(_filled(pb.GenerateRequest, given, _REQUEST))
    if _TIME_LIMIT in given:
        request.stopping.time_limit.CopyFrom(_duration(given[_TIME_LIMIT]))
    _set_constraint(request.structured_output, given)
    _set_prompt(request, prompt, given)
    return request


def chat_prompt(turns: Sequence[Any], given: Mapping[str, Any]) -> pb.ChatPrompt:
    """A conversation and the options that shape it."""
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
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt, given: Mapping[str, Any]) -> None:
    if not isinstance(prompt, str) and is_chat(prompt):
        request.chat.CopyFrom(chat_prompt(prompt, given))
        return
    if misplaced := _CHAT & given.keys():
        raise TypeError(f"options of a chat, and the prompt is none: {', '.join(sorted(misplaced))}")
    if isinstance(prompt, str):
        request.text = prompt
        return
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
    return pb.ChatMessage(**fields, tool_calls=calls)


def _set_constraint(target: pb.StructuredOutput, given: Mapping[str, Any]) -> None:
    asked = sorted(_CONSTRAINTS & given.keys())
    if len(asked) > 1:
        raise TypeError(f"only one of these can be met at a time: {', '.join(asked)}")
    for name in asked:
        value = given[name]
        if name == "choice":
            target.choice.values.extend(value)
            target.choice.SetInParent()
        elif name == "json_schema":
            target.json_schema = _schema(value)
        else:
            setattr(target, "ebnf_grammar" if name == "grammar" else name, value)


def _schema(schema: Schema) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _filled(kind: Callable[..., M], given: Mapping[str, Any], names: Mapping[str, str]) -> M:
    """A message whose fields are set by these options."""
    fields = {field: given[option] for option, field in names.items() if option in given}
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        for option, field in names.items():
            _try(kind, option, field, fields)
        raise


def _try(kind: Callable[..., Any], option: str, field: str, fields: Mapping[str, Any]) -> None:
    """Raise what protobuf says of one field, with the name that the caller knows: it names none itself."""
    if field in fields:
        try:
            kind(**{field: fields[field]})
        except (TypeError, ValueError) as error:
            raise type(error)(f"{option}: {error}") from None
