"""Body of ``POST /v1/chat/completions`` → one request of the core."""

from __future__ import annotations

from typing import Any

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.frontends.openai.bodies import (
    ChatBody,
    ChatMembers,
    ChatTurn,
    ContentPart,
    NamedTool,
    OfferedTool,
)
from gateway.frontends.openai.body_model import validate_members
from gateway.frontends.openai.request_builder import HttpGenerateRequest, RequestBuilder, read_stream
from gateway.frontends.openai.response_format import dump_schema, put_constraint
from gateway.frontends.openai.tool_choice import put_tool_choice
from gateway.request.json_values import number, string


def read_chat(members: dict[str, Any]) -> HttpGenerateRequest:
    """Build the request. Raises InvalidParameter or UnsupportedFeature, with OpenAI's name of the field."""
    body = validate_members(ChatBody, members)
    builder = RequestBuilder.from_body(body)
    request = builder.request
    put_constraint(body, builder)
    usage = read_stream(body, builder)
    _put_output_limit(body, builder)
    logprobs = _put_logprobs(body, builder)
    request.chat.SetInParent()  # also without a message
    for index, turn in enumerate(body.messages):
        _put_turn(f"messages[{index}]", turn, request.chat.messages.add())
    for index, tool in enumerate(body.tools or ()):
        _put_tool(f"tools[{index}]", tool, request.chat)
    _put_tool_choice(body, request.chat)
    _put_template_options(body, builder)
    if body.return_token_ids:
        request.response.token_ids = True
        request.response.echo_prompt = True
    return HttpGenerateRequest(
        (builder,),
        bool(body.stream),
        usage,
        logprobs,
        token_ids=bool(body.return_token_ids),
        reasoning=body.include_reasoning is not False,
    )


def _put_output_limit(body: ChatMembers, builder: RequestBuilder) -> None:
    """Read ``max_tokens`` under the names it goes by, which must agree."""
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidParameter("max_tokens", "contradicts max_completion_tokens")
    given = newer if older is None else older
    if given is not None:
        builder.request.stopping.max_tokens = given
        builder.names["stopping.max_tokens"] = "max_completion_tokens" if older is None else "max_tokens"


def _put_logprobs(body: ChatMembers, builder: RequestBuilder) -> bool:
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs", "needs logprobs")
    if body.logprobs:
        builder.request.response.logprobs = body.top_logprobs or 0
        builder.names["response.logprobs"] = "top_logprobs"
    return bool(body.logprobs)


def _put_turn(path: str, turn: ChatTurn, message: pb.ChatMessage) -> None:
    message.role = turn.role
    message.name = turn.name or ""
    message.tool_call_id = turn.tool_call_id or ""
    for call in turn.tool_calls or ():
        message.tool_calls.add(
            id=call.id or "", name=call.function.name, arguments_json=call.function.arguments or "{}"
        )
    content, thoughts = turn.content, turn.reasoning_content or turn.reasoning or ""
    if isinstance(content, list):
        thoughts = thoughts or "".join(part.thinking or "" for part in content)
        content = "".join(_part_text(f"{path}.content[{at}]", part) for at, part in enumerate(content))
    if content or turn.refusal:
        message.content = content or turn.refusal or ""
    elif content is None and not (message.tool_calls or thoughts):
        # Calls may stand alone. Any other turn without content is a mistake, which OpenAI refuses too.
        raise InvalidParameter(f"{path}.content", "is required")
    if turn.role == "assistant":
        message.reasoning_content = thoughts


def _part_text(path: str, part: ContentPart) -> str:
    """Return what a part adds to its turn's content. Raises InvalidParameter for one without it."""
    if part.type not in ("text", "refusal"):
        return ""
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidParameter(f"{path}.{part.type}", "is required")
    return text


def _put_tool(path: str, tool: OfferedTool, chat: pb.ChatPrompt) -> None:
    made = chat.tools.add(name=tool.function.name, description=tool.function.description or "")
    if tool.function.parameters is not None:
        schema = dump_schema(f"{path}.function.parameters", tool.function.parameters)
        made.parameters_json_schema = schema


def _put_tool_choice(body: ChatMembers, chat: pb.ChatPrompt) -> None:
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        put_tool_choice(chat, None, choice.function.name, body.parallel_tool_calls)
    else:
        put_tool_choice(chat, choice, None, body.parallel_tool_calls)


def _check_json_value(path: str, value: object, depth: int) -> None:
    """Raise InvalidParameter for a value that protobuf's Struct cannot hold, or that is too deep."""
    if depth < 0:
        raise InvalidParameter(path, "is nested too deeply")
    if isinstance(value, dict):
        for name, one in value.items():
            string(path, name)
            _check_json_value(path, one, depth - 1)
    elif isinstance(value, list):
        for one in value:
            _check_json_value(path, one, depth - 1)
    elif isinstance(value, str):
        string(path, value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number(path, value)


def _put_template_options(body: ChatMembers, builder: RequestBuilder) -> None:
    """Set what the model's chat template reads besides the messages."""
    chat = builder.request.chat
    if body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    path = "chat_template_kwargs"
    if body.chat_template_kwargs:
        _check_json_value(path, body.chat_template_kwargs, limits.MAX_TEMPLATE_KWARGS_DEPTH)
        chat.template_kwargs.update(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        chat.template_kwargs["reasoning_effort"] = body.reasoning_effort
        builder.names["chat.template_kwargs.reasoning_effort"] = "reasoning_effort"
