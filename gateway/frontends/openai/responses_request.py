"""Body of ``POST /v1/responses`` → one request of the core."""

from __future__ import annotations

from typing import Any, Final

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.openai.body_model import validate_members
from gateway.frontends.openai.image_url import check_detail, put_image
from gateway.frontends.openai.request_builder import HttpGenerateRequest, RequestBuilder, StreamUsage
from gateway.frontends.openai.response_format import check_form, dump_schema, put_any_object, put_schema
from gateway.frontends.openai.responses_bodies import (
    IMAGE_PART,
    CallItem,
    Content,
    FunctionTool,
    NamedChoice,
    ReasoningItem,
    ResponsesBody,
    ResponsesMembers,
    ResultItem,
    TextFormat,
    TextPart,
)
from gateway.frontends.openai.tool_choice import put_tool_choice

# Of tools and inputs that are not there, and encrypted reasoning: an answer has none of it.
_INCLUDED: Final = (
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


def read_responses(members: dict[str, Any]) -> tuple[HttpGenerateRequest, ResponsesMembers]:
    """Build the request. Raises InvalidParameter or UnsupportedFeature, with OpenAI's name of the field."""
    body: ResponsesMembers = validate_members(ResponsesBody, members)
    for index, name in enumerate(body.include or ()):
        if name not in _INCLUDED:
            raise UnsupportedFeature(f"include[{index}]")
    builder = RequestBuilder.from_body(body)
    chat = builder.request.chat
    chat.SetInParent()
    if body.max_output_tokens is not None:
        builder.request.stopping.max_tokens = body.max_output_tokens
        builder.names["stopping.max_tokens"] = "max_output_tokens"
    if body.instructions:
        _add_turn(builder, "instructions").MergeFrom(pb.ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        _add_turn(builder, "input").MergeFrom(pb.ChatMessage(role="user", content=body.input))
    else:
        _put_items(body.input, builder)
    builder.names["chat.messages"] = "input"
    for index, tool in enumerate(body.tools or ()):
        _put_tool(index, tool, builder)
    _put_tool_choice(body, chat)
    if body.text is not None and body.text.format is not None:
        _put_format(body.text.format, builder)
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat.template_kwargs["reasoning_effort"] = body.reasoning.effort
        builder.names["chat.template_kwargs.reasoning_effort"] = "reasoning.effort"
    return HttpGenerateRequest((builder,), bool(body.stream), StreamUsage(), logprobs=False), body


def _add_turn(builder: RequestBuilder, path: str) -> pb.ChatMessage:
    messages = builder.request.chat.messages
    builder.names[f"chat.messages[{len(messages)}]"] = path
    return messages.add()


def _put_items(items: list[Any], builder: RequestBuilder) -> None:
    """Set the conversation. Reasoning, text and calls of one response are one turn of the assistant."""
    turn: pb.ChatMessage | None = None  # the assistant's, while it goes on
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if isinstance(item, ResultItem):
            turn = None
            made = _add_turn(builder, path)
            made.role, made.tool_call_id = "tool", item.call_id
            made.content = _text(f"{path}.output", item.output)
            continue
        own = isinstance(item, CallItem | ReasoningItem) or item.role == "assistant"
        if not own:
            turn = None
            made = _add_turn(builder, path)
            made.role = item.role
            if isinstance(item.content, list) and any(part.type == IMAGE_PART for part in item.content):
                _put_parts(f"{path}.content", item.content, builder)
            else:
                made.content = _text(f"{path}.content", item.content)
            continue
        if turn is None or (turn.content and not isinstance(item, CallItem)):
            turn = _add_turn(builder, path)
            turn.role = "assistant"
        if isinstance(item, CallItem):
            _put_call(path, item, builder)
        elif isinstance(item, ReasoningItem):
            turn.reasoning_content += _joined(f"{path}.content", item.content or item.summary or [])
        else:
            turn.content = _text(f"{path}.content", item.content)


def _put_call(path: str, item: CallItem, builder: RequestBuilder) -> None:
    """Add a call to the last turn."""
    messages = builder.request.chat.messages
    calls = messages[-1].tool_calls
    known = f"chat.messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
    calls.add(id=item.call_id, name=item.name, arguments_json=item.arguments or "{}")
    members = {"id": "call_id", "name": "name", "arguments_json": "arguments"}
    builder.names |= {f"{known}.{name}": f"{path}.{own}" for name, own in members.items()}


def _put_parts(path: str, parts: list[TextPart], builder: RequestBuilder) -> None:
    """Set the parts of the last turn, which has images. Raises InvalidParameter or UnsupportedFeature."""
    messages = builder.request.chat.messages
    for at, part in enumerate(parts):
        own = f"{path}[{at}]"
        if part.type != IMAGE_PART:
            messages[-1].parts.add(text=_joined(path, [part]))
            continue
        if part.image_url is None:
            raise InvalidParameter(f"{own}.image_url", "is required")
        known = f"chat.messages[{len(messages) - 1}].parts[{len(messages[-1].parts)}].image"
        own_names = {known: f"{own}.image_url", f"{known}.url": f"{own}.image_url"}
        builder.names = {**own_names, **builder.names}  # before those of the turn
        check_detail(f"{own}.detail", part.detail)
        put_image(f"{own}.image_url", part.image_url, messages[-1].parts.add().image)


def _text(path: str, content: Content) -> str:
    return content if isinstance(content, str) else _joined(path, content)


def _joined(path: str, parts: list[TextPart]) -> str:
    texts = []
    for index, part in enumerate(parts):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type == IMAGE_PART:
            raise UnsupportedFeature(f"{path}[{index}]", "images are read in turns of the user only")
        if text is None:
            raise InvalidParameter(f"{path}[{index}].text", "is required")
        texts.append(text)
    return "".join(texts)


def _put_tool(index: int, tool: FunctionTool, builder: RequestBuilder) -> None:
    path, known = f"tools[{index}]", f"chat.tools[{index}]"
    made = builder.request.chat.tools.add(name=tool.name, description=tool.description or "")
    if tool.parameters is not None:
        made.parameters_json_schema = dump_schema(f"{path}.parameters", tool.parameters)
    builder.names[f"{known}.name"] = f"{path}.name"
    builder.names[f"{known}.parameters_json_schema"] = f"{path}.parameters"


def _put_tool_choice(body: ResponsesMembers, chat: pb.ChatPrompt) -> None:
    choice = body.tool_choice
    if isinstance(choice, NamedChoice):
        put_tool_choice(chat, None, choice.name, body.parallel_tool_calls)
    else:
        put_tool_choice(chat, choice, None, body.parallel_tool_calls)


def _put_format(wanted: TextFormat, builder: RequestBuilder) -> None:
    path = "text.format"
    check_form(path, wanted.type)
    if wanted.type == "json_schema":
        if wanted.schema_ is None:
            raise InvalidParameter(f"{path}.schema", "is required")
        put_schema(f"{path}.schema", wanted.schema_, builder)
    elif wanted.schema_ is not None:
        raise InvalidParameter(f"{path}.schema", "goes with the type json_schema only")
    elif wanted.type == "json_object":
        put_any_object(path, builder)
