"""Checks of the prompt in its three forms, and its token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.struct_pb2 import Struct, Value

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.runtime.tokenizer.control_tokens import ControlToken
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.model.chat_template import ChatTemplate, Message, RenderRefused
from gateway.model.images import PreparedImage
from gateway.model.plain_tool_turns import plain_tool_turns
from gateway.model.role_support import ROLES
from gateway.model.served_model import ServedModel
from gateway.reasoning.request_reasoning import RequestReasoning
from gateway.request.field_checks import message_name
from gateway.request.json_values import whole
from gateway.request.validate_stopping import TokenBudget
from gateway.request.validate_tools import tool_call_id, tool_calls, toolbox
from gateway.tools.tool import Toolbox, ToolCall

# Where a prompt's tokens come from, by the kind of prompt.
_FIELDS: Final = {"token_ids": "token_ids.ids", "text": "text", "chat": "chat.messages"}
_KWARGS: Final = "chat.template_kwargs"
# Settings that clients send to any model: whether and how much it is to think.
_FLAGS: Final = ("enable_thinking", "thinking")
_EFFORT: Final = "reasoning_effort"
_TAIL_TOKENS: Final = 16  # of a prompt: more than the marks of a span and the white space around them


def prompt_ids(
    request: pb.GenerateRequest,
    model: ServedModel,
    budget: TokenBudget,
    tools: Toolbox | None = None,
    images: Sequence[PreparedImage] = (),
) -> tuple[int, ...]:
    """Return token ids of the prompt, never empty, within ``budget``; ``tools`` are of `chat_tools`.

    ``images`` are the conversation's, in their order.

    Raises `InvalidParameter`, `UnsupportedFeature` or `ContextLengthExceeded`; a prompt that is certainly too
    long is refused before it is tokenized.
    """
    kind = request.WhichOneof("prompt")
    field = _FIELDS.get(kind or "", "prompt")
    if kind == "token_ids":
        ids: Sequence[int] = given_ids(field, request.token_ids.ids, model.card.vocab_size, budget)
    elif kind == "text":
        num_bytes = check_text(field, request.text)
        budget.check_before_counting(field, model.tokenizer.fewest_tokens(num_bytes))
        ids = model.tokenizer.encode(request.text, add_special=True)
    elif kind == "chat":
        parts = chat_parts(request.chat, model, tools, images)
        num_bytes = sum(len(part.encode("utf-8")) for part in parts if isinstance(part, str))
        budget.check_before_counting(field, model.tokenizer.fewest_tokens(num_bytes))
        ids = model.tokenizer.encode_parts(parts)
    else:
        raise InvalidParameter(field, "one of text, token_ids and chat is required")
    if not ids:
        raise InvalidParameter(kind, "has no tokens")
    budget.check(field, len(ids))
    if max(ids) >= model.card.vocab_size:
        # Some models' tokenizers have tokens that the model never got.
        size = model.card.vocab_size
        raise InvalidParameter(field, f"has a token that is not below the model's vocabulary size {size}")
    return tuple(ids)


def given_ids(field: str, ids: Sequence[int], vocab_size: int, budget: TokenBudget | None) -> Sequence[int]:
    """Check ids that the caller sent. Length first: it costs nothing, and a million ids are not looked at."""
    if not ids:
        raise InvalidParameter(field, "must not be empty")
    if budget is not None:
        budget.check(field, len(ids))
    if max(ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidParameter(f"{field}[{index}]", f"must be below the vocabulary size {vocab_size}")
    return ids


def check_text(field: str, text: str) -> int:
    """Return the bytes of a text prompt. Raises InvalidParameter."""
    if not text:
        raise InvalidParameter(field, "must not be empty")
    num_bytes = len(text.encode("utf-8"))
    _check_size(field, num_bytes)
    return num_bytes


def chat_tools(chat: pb.ChatPrompt, model: ServedModel) -> Toolbox | None:
    """Return the tools of a conversation. Raises InvalidParameter or UnsupportedFeature."""
    asked = bool(chat.tools) or chat.HasField("tool_choice")
    return toolbox(chat, model.tools) if asked and model.chat_template is not None else None


def chat_parts(
    chat: pb.ChatPrompt,
    model: ServedModel,
    tools: Toolbox | None,
    images: Sequence[PreparedImage] = (),
) -> tuple[ControlToken | str, ...]:
    """Render the conversation, with the tokens of ``images`` where it has them.

    Raises InvalidParameter or UnsupportedFeature; the latter for images where none are given.
    """
    template = model.chat_template
    if template is None:
        raise UnsupportedFeature("chat", "this model has no chat template")
    if not chat.messages:
        raise InvalidParameter("chat.messages", "must not be empty")
    if len(chat.messages) > limits.MAX_MESSAGES:
        raise InvalidParameter("chat.messages", f"must have at most {limits.MAX_MESSAGES} messages")
    _check_size("chat.messages", sum(map(_bytes_of, chat.messages)))
    if not images:
        _refuse_images(chat)
    messages = _messages(chat, model, tools)
    kwargs = _template_kwargs(chat.template_kwargs, template)
    add_prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    try:
        parts = template.render(
            messages,
            add_generation_prompt=add_prompt,
            tools=() if tools is None or model.tools.generic else tools.tools,
            kwargs=kwargs,
        )
    except RenderRefused as error:
        raise InvalidParameter("chat.messages", f"the model's chat template refused: {error}") from error
    if images and model.images is not None:
        expanded = model.images.expand(parts, images)
        if expanded is None:
            raise InvalidParameter(
                "chat.messages", "the model's chat template does not show each of these images once"
            )
        parts = expanded
    if tools is None or not tools.forced or _reasoning_after(parts, model) is not None:
        return parts
    return (*parts, *model.tools.prompt_suffix)


def chat_reasoning(
    prompt_ids: Sequence[int], model: ServedModel, tools: Toolbox | None
) -> RequestReasoning | None:
    """Return the reasoning that the answer to a conversation's prompt may begin with."""
    tail = model.tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special=False)
    suffix = "".join(map(_text_of, model.tools.prompt_suffix))
    if suffix and tools is not None and tools.forced and tail.endswith(suffix):
        return None  # see `chat_parts`
    return RequestReasoning.after(tail, model.reasoning)


def _reasoning_after(parts: Sequence[ControlToken | str], model: ServedModel) -> RequestReasoning | None:
    return RequestReasoning.after("".join(map(_text_of, parts[-_TAIL_TOKENS:])), model.reasoning)


def _text_of(part: ControlToken | str) -> str:
    return part if isinstance(part, str) else part.text


def _refuse_images(chat: pb.ChatPrompt) -> None:
    for index, message in enumerate(chat.messages):
        for place, part in enumerate(message.parts):
            if part.WhichOneof("part") == "image":
                field = f"chat.messages[{index}].parts[{place}].image"
                raise UnsupportedFeature(field, "images are read by generation only")


def _bytes_of(message: pb.ChatMessage) -> int:
    """Count the bytes of a turn that the template gets."""
    calls = sum(call.ByteSize() for call in message.tool_calls)
    texts = (message.content, message.reasoning_content, *(part.text for part in message.parts))
    return sum(len(text.encode("utf-8")) for text in texts) + calls


def _check_size(field: str, num_bytes: int) -> None:
    if num_bytes > limits.MAX_PROMPT_BYTES:
        raise InvalidParameter(field, f"must be at most {limits.MAX_PROMPT_BYTES} bytes")


def _messages(chat: pb.ChatPrompt, model: ServedModel, tools: Toolbox | None) -> list[Message]:
    """Check the turns, and put tools into words where the template has none."""
    messages: list[Message] = []
    leading = True
    roles = model.roles if tools is None else model.roles_beside_tools
    for index, message in enumerate(chat.messages):
        field = f"chat.messages[{index}]"
        if message.role not in ROLES:
            raise InvalidParameter(f"{field}.role", f"must be one of {', '.join(ROLES)}")
        role = roles.rendered_role(message.role, index, leading=leading)
        leading = leading and message.role in ("system", "developer")
        if role is None:
            where = "first" if index == 0 else "here"
            reason = f"this model's chat template does not render a turn of the {message.role} {where}"
            raise UnsupportedFeature(f"{field}.role", reason)
        messages.append(_message(field, role, message, model))
    with_tools = tools is not None or any(turn.tool_calls or turn.role == "tool" for turn in messages)
    if not (with_tools and model.tools.generic):
        return messages
    offered = () if tools is None else tools.tools
    native = model.tools.calls and model.tools.turns
    return plain_tool_turns(messages, offered, system="system" in roles.first, calls=native)


def _message(field: str, role: str, message: pb.ChatMessage, model: ServedModel) -> Message:
    answers = ""
    calls: tuple[ToolCall, ...] = ()
    if message.role == "tool" or message.tool_call_id or message.tool_calls:
        answers = tool_call_id(field, message, model.tools)
        calls = tool_calls(field, message, model.tools)
    parts = _parts(field, message)
    if None not in parts and parts:
        message_content, parts = "".join(part or "" for part in parts), ()
    else:
        message_content = message.content
    return Message(
        role,
        message_content,
        message_name(f"{field}.name", message.name),  # agents send one always; the template need not look
        calls,
        answers,
        _reasoning(field, message),
        parts,
    )


def _parts(field: str, message: pb.ChatMessage) -> tuple[str | None, ...]:
    """Return the texts of a turn's parts, and None for each image; empty for a turn without parts."""
    if not message.parts:
        return ()
    if message.content:
        raise InvalidParameter(f"{field}.content", "must be empty beside parts")
    kinds = [part.WhichOneof("part") for part in message.parts]
    if None in kinds:
        raise InvalidParameter(f"{field}.parts[{kinds.index(None)}]", "must be a text or an image")
    return tuple(None if part.WhichOneof("part") == "image" else part.text for part in message.parts)


def _reasoning(field: str, message: pb.ChatMessage) -> str:
    if message.reasoning_content and message.role != "assistant":
        raise InvalidParameter(f"{field}.reasoning_content", "is an assistant's")
    return message.reasoning_content


def _template_kwargs(given: Struct, template: ChatTemplate) -> dict[str, object]:
    """Return what the template is asked to read besides the conversation.

    A setting that it does not read is refused, unless the value asks for nothing.
    """
    kwargs: dict[str, object] = {}
    for name, value in given.fields.items():
        plain = _plain(value)
        if name in _FLAGS and not isinstance(plain, bool):
            raise InvalidParameter(f"{_KWARGS}.{name}", "must be true or false")
        if name == _EFFORT and not isinstance(plain, str):
            raise InvalidParameter(f"{_KWARGS}.{name}", "must be a string")
        if not template.is_reserved(name) and template.reads_variable(name):
            kwargs[name] = plain
        elif not _asks_for_nothing(name, plain):
            if name in (*_FLAGS, _EFFORT):
                raise UnsupportedFeature(
                    f"{_KWARGS}.{name}", "this model's chat template has no such setting"
                )
            readable = ", ".join(sorted(template.settings)) or "nothing"
            raise InvalidParameter(_KWARGS, f"may hold what this model's chat template reads: {readable}")
    if _EFFORT in given.fields and given.fields[_EFFORT].string_value == "none":
        for flag in _FLAGS:
            if template.reads_variable(flag):
                kwargs.setdefault(flag, False)
    return kwargs


def _asks_for_nothing(name: str, value: object) -> bool:
    return (name in _FLAGS and value is False) or (name == _EFFORT and value in ("none", "minimal"))


def _plain(value: Value) -> object:
    """Return the JSON value. JSON's numbers have one kind: whole ones are integers."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        # A map of protobuf has no order, and a prompt must have one.
        return {name: _plain(one) for name, one in sorted(value.struct_value.fields.items())}
    if kind == "list_value":
        return [_plain(one) for one in value.list_value.values]
    if kind == "number_value":
        return whole(value.number_value)
    return None if kind is None or kind == "null_value" else getattr(value, kind)
