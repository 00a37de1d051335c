"""Body of ``POST /v1/messages`` → one request of the core, and the conversation to count tokens of."""

from __future__ import annotations

import json
from typing import Any, Final

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.anthropic.messages_bodies import (
    CallBlock,
    CountTokensBody,
    CountTokensMembers,
    ImageBlock,
    MessagesBody,
    MessagesMembers,
    MessageTurn,
    ResultBlock,
    SchemaFormat,
    TextBlock,
    Texts,
    ThinkingBlock,
)
from gateway.frontends.openai.body_model import validate_members
from gateway.frontends.openai.image_url import put_base64
from gateway.frontends.openai.request_builder import HttpGenerateRequest, RequestBuilder, StreamUsage
from gateway.frontends.openai.response_format import dump_schema

_TOOL_CHOICES: Final = {
    "auto": pb.ToolChoice.MODE_AUTO,
    "any": pb.ToolChoice.MODE_REQUIRED,
    "tool": pb.ToolChoice.MODE_NAMED,
    "none": pb.ToolChoice.MODE_NONE,
}
_THINKING: Final = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def read_messages(members: dict[str, Any]) -> HttpGenerateRequest:
    """Build the request. Raises InvalidParameter or UnsupportedFeature, with Anthropic's name of a field."""
    body: MessagesMembers = validate_members(MessagesBody, members)
    builder = _conversation(body)
    builder.request.stopping.max_tokens = body.max_tokens
    builder.request.stopping.stop.extend(body.stop_sequences or ())
    builder.names |= {"stopping.max_tokens": "max_tokens", "stopping.stop": "stop_sequences"}
    shown = body.thinking is None or body.thinking.display != "omitted"
    return HttpGenerateRequest((builder,), bool(body.stream), StreamUsage(), logprobs=False, reasoning=shown)


def read_count(members: dict[str, Any]) -> RequestBuilder:
    """Build the conversation to count. Raises as `read_messages` does."""
    return _conversation(validate_members(CountTokensBody, members))


def _conversation(body: CountTokensMembers) -> RequestBuilder:
    """Return the request with its turns, tools and template options."""
    builder = RequestBuilder.from_body(body)
    chat = builder.request.chat
    chat.SetInParent()
    if body.system:
        _add_turn(builder, "system", "system").content = _text(body.system)
    for index, turn in enumerate(body.messages):
        _put_turn(f"messages[{index}]", turn, builder)
    if not body.messages:
        raise InvalidParameter("messages", "must not be empty")
    if body.messages[-1].role == "assistant":
        why = "must not be the last turn: an answer that is begun by the client is not continued here"
        raise UnsupportedFeature(f"messages[{len(body.messages) - 1}].role", why)
    builder.names["chat.messages"] = "messages"
    for index, tool in enumerate(body.tools or ()):
        path, known = f"tools[{index}]", f"chat.tools[{index}]"
        made = chat.tools.add(name=tool.name, description=tool.description or "")
        made.parameters_json_schema = dump_schema(f"{path}.input_schema", tool.input_schema)
        builder.names[f"{known}.name"] = f"{path}.name"
        builder.names[f"{known}.parameters_json_schema"] = f"{path}.input_schema"
    _put_tool_choice(body, builder)
    _put_thinking(body, builder)
    if body.output_config is not None and body.output_config.format is not None:
        _put_format(body.output_config.format, builder)
    return builder


def _add_turn(builder: RequestBuilder, path: str, role: str) -> pb.ChatMessage:
    messages = builder.request.chat.messages
    builder.names[f"chat.messages[{len(messages)}]"] = path
    made = messages.add()
    made.role = role
    return made


def _put_turn(path: str, turn: MessageTurn, builder: RequestBuilder) -> None:
    """Add a turn. Of a user's, results become turns of their own, in the order of the blocks.

    A turn with images has its texts in parts, too.
    """
    if isinstance(turn.content, str):
        _add_turn(builder, path, turn.role).content = turn.content
        return
    made: pb.ChatMessage | None = None  # the turn that texts go into
    shows = any(isinstance(block, ImageBlock) for block in turn.content)
    for index, block in enumerate(turn.content):
        at = f"{path}.content[{index}]"
        if isinstance(block, ResultBlock):
            if turn.role != "user":
                raise InvalidParameter(at, "goes with the role user only")
            made, result = None, _add_turn(builder, at, "tool")
            result.tool_call_id, result.content = block.tool_use_id, _text(block.content or "")
            continue
        if made is None:
            made = _add_turn(builder, path, turn.role)
        if isinstance(block, TextBlock):
            _put_text(block.text, made, shows=shows)
        elif isinstance(block, ImageBlock):
            if turn.role != "user":
                raise InvalidParameter(at, "goes with the role user only")
            _put_image(at, block, made, builder)
        elif turn.role != "assistant":
            raise InvalidParameter(at, "goes with the role assistant only")
        elif isinstance(block, CallBlock):
            made.tool_calls.add(id=block.id, name=block.name, arguments_json=_arguments(at, block.input))
        elif isinstance(block, ThinkingBlock):
            made.reasoning_content += block.thinking
    if not turn.content:
        raise InvalidParameter(f"{path}.content", "must not be empty")


def _put_text(text: str, made: pb.ChatMessage, *, shows: bool) -> None:
    if not shows:
        made.content += text
    elif text:
        made.parts.add(text=text)


def _put_image(path: str, block: ImageBlock, made: pb.ChatMessage, builder: RequestBuilder) -> None:
    """Add an image to a turn, the last one. Raises InvalidParameter or UnsupportedFeature."""
    source, own = block.source, f"{path}.source"
    if source.type not in ("base64", "url"):
        raise UnsupportedFeature(f"{own}.type", "must be base64 or url: this server keeps no images")
    known = f"chat.messages[{len(builder.request.chat.messages) - 1}].parts[{len(made.parts)}].image"
    builder.names[known] = own
    image = made.parts.add().image
    if source.type == "url":
        if not source.url:
            raise InvalidParameter(f"{own}.url", "is required")
        image.url = source.url
        return
    if source.data is None:
        raise InvalidParameter(f"{own}.data", "is required")
    put_base64(f"{own}.data", source.data, (source.media_type or "").lower(), image)


def _arguments(path: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode().decode()
    except (ValueError, RecursionError):  # half a surrogate pair, infinity, or too deep
        raise InvalidParameter(f"{path}.input", "must be plain JSON") from None


def _text(content: Texts) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _put_tool_choice(body: CountTokensMembers, builder: RequestBuilder) -> None:
    choice, chat = body.tool_choice, builder.request.chat
    if choice is None:
        return
    if choice.type not in _TOOL_CHOICES:
        raise InvalidParameter("tool_choice.type", f"must be one of {', '.join(_TOOL_CHOICES)}")
    if choice.type != "auto" or chat.tools:
        chat.tool_choice.mode = _TOOL_CHOICES[choice.type]
    if choice.type == "tool":
        if not choice.name:
            raise InvalidParameter("tool_choice.name", "is required")
        chat.tool_choice.name = choice.name
    if choice.disable_parallel_tool_use and chat.tools:
        chat.tool_choice.parallel = False
    builder.names["chat.tool_choice.name"] = "tool_choice.name"
    builder.names["chat.tool_choice.mode"] = "tool_choice.type"
    builder.names["chat.tool_choice.parallel"] = "tool_choice.disable_parallel_tool_use"


def _put_thinking(body: CountTokensMembers, builder: RequestBuilder) -> None:
    """Set what templates read of thinking. Without the member the model's own default holds."""
    kwargs = builder.request.chat.template_kwargs
    if body.thinking is not None:
        if body.thinking.type not in _THINKING:
            raise InvalidParameter("thinking.type", f"must be one of {', '.join(_THINKING)}")
        kwargs["enable_thinking"] = _THINKING[body.thinking.type]
        builder.names["chat.template_kwargs.enable_thinking"] = "thinking.type"
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
        builder.names["chat.template_kwargs.reasoning_effort"] = "output_config.effort"


def _put_format(wanted: SchemaFormat, builder: RequestBuilder) -> None:
    path = "output_config.format"
    if wanted.type != "json_schema":
        raise UnsupportedFeature(f"{path}.type", "must be json_schema")
    builder.request.structured_output.json_schema = dump_schema(f"{path}.schema", wanted.schema_)
    builder.names["structured_output.json_schema"] = f"{path}.schema"
