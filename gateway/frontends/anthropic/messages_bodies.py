"""Bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, as pydantic models.

Blocks that are not read (documents, server tools, images within results) are refused by name. What concerns
Anthropic's own service, such as cache breakpoints, is accepted without effect: prefixes are always cached.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, create_model

from diptych.parameters import PARAMETERS
from gateway import limits
from gateway.frontends.openai.bodies import NO_EFFECT, ROWS, CommonMembers
from gateway.frontends.openai.body_model import (
    OpenModel,
    Raw,
    Text,
    absent,
    at_most,
    count_of,
    either,
    parameter_fields,
    rule,
    tagged,
    unsupported,
)
from gateway.request.json_values import whole

ROLES: Final = ("user", "assistant", "system")
TEXT, IMAGE, THINKING, REDACTED = "text", "image", "thinking", "redacted_thinking"
CALL, RESULT = "tool_use", "tool_result"
IGNORED: Final = ("metadata", "service_tier", "cache_control", "inference_geo", "context_management", "speed")


class TextBlock(OpenModel):
    """Text of either side."""

    type: Text
    text: Text


class ImageSource(OpenModel):
    """Image in base64, or at a URL. Sources of other types are refused where the block is read."""

    type: Text
    media_type: Text | None = None
    data: Text | None = None
    url: Text | None = None


class ImageBlock(OpenModel):
    """Image that a user shows."""

    type: Text
    source: ImageSource


class ThinkingBlock(OpenModel):
    """Reasoning of an earlier answer. Signatures are not checked."""

    type: Text
    thinking: Text


class RedactedBlock(OpenModel):
    """Reasoning that another server encrypted; it is left out."""

    type: Text


class CallBlock(OpenModel):
    """Call that an earlier answer made."""

    type: Text
    id: Text
    name: Text
    input: Raw


def _text_only(kind: str) -> str:
    if kind != TEXT:
        raise unsupported("must be text: this server reads nothing else")
    return kind


class ResultText(OpenModel):
    """Text of a tool's result, or of the system prompt."""

    type: Annotated[Text, AfterValidator(_text_only)]
    text: Text


_Texts = Annotated[list[ResultText], at_most(limits.MAX_JSON_LIST), Tag(tagged("list"))]
Texts = Annotated[
    Annotated[Text, Tag(tagged("text"))] | _Texts,
    either("must be a string or an array of text blocks"),
]


class ResultBlock(OpenModel):
    """Result of a call. That it is an error is told by its content alone."""

    type: Text
    tool_use_id: Text
    content: Texts | None = None


def _kind_of(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return tagged(kind) if kind in (TEXT, IMAGE, THINKING, REDACTED, CALL, RESULT) else None


Block = Annotated[
    Annotated[TextBlock, Tag(tagged(TEXT))]
    | Annotated[ImageBlock, Tag(tagged(IMAGE))]
    | Annotated[ThinkingBlock, Tag(tagged(THINKING))]
    | Annotated[RedactedBlock, Tag(tagged(REDACTED))]
    | Annotated[CallBlock, Tag(tagged(CALL))]
    | Annotated[ResultBlock, Tag(tagged(RESULT))],
    Discriminator(
        _kind_of,
        custom_error_type="rule",
        custom_error_message=f"must be a {TEXT}, {IMAGE}, {THINKING}, {CALL} or {RESULT} block",
    ),
]
_Blocks = Annotated[list[Block], at_most(limits.MAX_JSON_LIST), Tag(tagged("list"))]
Content = Annotated[
    Annotated[Text, Tag(tagged("text"))] | _Blocks,
    either("must be a string or an array of blocks"),
]


def _role(role: str) -> str:
    if role not in ROLES:
        raise rule(f"must be {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    return role


class MessageTurn(OpenModel):
    """Turn of a conversation."""

    role: Annotated[Text, AfterValidator(_role)]
    content: Content


def _custom(kind: str) -> str:
    if kind != "custom":
        raise unsupported("must be custom: this server runs no tools of its own")
    return kind


class MessagesTool(OpenModel):
    """Tool that the model may call."""

    type: Annotated[Text, AfterValidator(_custom)] | None = None
    name: Text
    description: Text | None = None
    input_schema: Raw


class MessagesToolChoice(OpenModel):
    """Choice of tools: ``auto``, ``any``, ``tool`` with a name, or ``none``."""

    type: Text
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(OpenModel):
    """Thinking: ``enabled``, ``adaptive`` or ``disabled``. A budget has no effect; ``omitted`` hides it."""

    type: Text
    display: Text | None = None


class SchemaFormat(OpenModel):
    """Schema that the answer's text keeps to."""

    type: Text
    schema_: Raw = Field(alias="schema")


class OutputConfig(OpenModel):
    """Effort of reasoning, for templates that read it, and the form of the answer."""

    effort: Text | None = None
    format: SchemaFormat | None = None


_MaxTokens = Annotated[int, count_of(PARAMETERS["max_tokens"]), BeforeValidator(whole)]


class CountTokensMembers(CommonMembers):
    """Body of ``POST /v1/messages/count_tokens``."""

    messages: Annotated[list[MessageTurn], at_most(limits.MAX_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[MessagesTool], at_most(limits.MAX_JSON_LIST)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    container: Annotated[Any, absent()] = None
    mcp_servers: Annotated[Any, absent([])] = None
    n: Annotated[Any, absent(1)] = None
    best_of: Annotated[Any, absent(1)] = None
    stop: Annotated[Any, absent([])] = None
    use_beam_search: Annotated[Any, absent(False)] = None
    return_token_ids: Annotated[Any, absent(False)] = None
    response_format: Annotated[Any, absent()] = None
    stream_options: Annotated[Any, absent({})] = None


class MessagesMembers(CountTokensMembers):
    """Body of ``POST /v1/messages``."""

    max_tokens: _MaxTokens = Field(description=PARAMETERS["max_tokens"].about)
    stop_sequences: Annotated[list[Text], at_most(limits.MAX_JSON_LIST)] | None = Field(
        None, description=PARAMETERS["stop"].about
    )


def _with_parameters(name: str, base: type[CountTokensMembers]) -> Any:
    shared: dict[str, Any] = {
        **parameter_fields(ROWS),
        **dict.fromkeys(IGNORED, (Annotated[Any, NO_EFFECT], None)),
    }
    added = {member: made for member, made in shared.items() if member not in base.model_fields}
    return create_model(name, __base__=base, **added)


MessagesBody: Final = _with_parameters("MessagesBody", MessagesMembers)
CountTokensBody: Final = _with_parameters("CountTokensBody", CountTokensMembers)
