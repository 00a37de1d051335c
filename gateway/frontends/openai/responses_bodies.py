"""Body of ``POST /v1/responses``, as pydantic models.

Nothing is stored: what refers to an earlier response by its id is refused, and a conversation is sent whole.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, create_model

from diptych.parameters import PARAMETERS
from gateway import limits
from gateway.frontends.openai.bodies import IGNORED, NO_EFFECT, ROWS, CommonMembers
from gateway.frontends.openai.body_model import (
    BodyModel,
    OpenModel,
    Raw,
    Text,
    TextOrObject,
    TextOrParts,
    absent,
    at_most,
    count_of,
    either,
    parameter_fields,
    tagged,
    unsupported,
)
from gateway.request.json_values import whole

_TEXT_PARTS: Final = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
MESSAGE, CALL, RESULT, REASONING = "message", "function_call", "function_call_output", "reasoning"


def _text_part(kind: str) -> str:
    if kind not in _TEXT_PARTS:
        raise unsupported("must be a kind of text: this server reads nothing else")
    return kind


class TextPart(OpenModel):
    """Part of a content: a text of either side, or what a model refused with."""

    type: Annotated[Text, AfterValidator(_text_part)]
    text: Text | None = None
    refusal: Text | None = None


Content = TextOrParts[TextPart]


class MessageItem(OpenModel):
    """Turn of a conversation; its type may be left out."""

    type: Text = MESSAGE
    role: Text
    content: Content


class CallItem(OpenModel):
    """Call that an earlier response made."""

    type: Text
    call_id: Text
    name: Text
    arguments: Text


class ResultItem(OpenModel):
    """Result of a call."""

    type: Text
    call_id: Text
    output: Content


class ReasoningItem(OpenModel):
    """Reasoning of an earlier response. A summary stands for a content that is not there."""

    type: Text
    summary: Annotated[list[TextPart], at_most(limits.MAX_JSON_LIST)] | None = None
    content: Annotated[list[TextPart], at_most(limits.MAX_JSON_LIST)] | None = None


def _kind_of(value: object) -> str | None:
    kind = value.get("type", MESSAGE) if isinstance(value, dict) else None
    return tagged(kind) if kind in (MESSAGE, CALL, RESULT, REASONING) else None


Item = Annotated[
    Annotated[MessageItem, Tag(tagged(MESSAGE))]
    | Annotated[CallItem, Tag(tagged(CALL))]
    | Annotated[ResultItem, Tag(tagged(RESULT))]
    | Annotated[ReasoningItem, Tag(tagged(REASONING))],
    Discriminator(
        _kind_of,
        custom_error_type="rule",
        custom_error_message=f"must be a {MESSAGE}, {CALL}, {RESULT} or {REASONING} item",
    ),
]
_Items = Annotated[list[Item], at_most(limits.MAX_MESSAGES), Tag(tagged("list"))]
Input = Annotated[
    Annotated[Text, Tag(tagged("text"))] | _Items,
    either("must be a string or an array of items"),
]


def _function(kind: str) -> str:
    if kind != "function":
        raise unsupported("must be function: this server runs no tools of its own")
    return kind


class FunctionTool(OpenModel):
    """Function that the model may call."""

    type: Annotated[Text, AfterValidator(_function)]
    name: Text
    description: Text | None = None
    parameters: Raw | None = None
    strict: bool | None = None


class NamedChoice(OpenModel):
    """Function that the model must call."""

    type: Annotated[Text, AfterValidator(_function)]
    name: Text


class TextFormat(BodyModel):
    """Form of the answer: ``text``, ``json_object`` or ``json_schema``."""

    type: Text
    name: Text | None = None
    description: Text | None = None
    strict: bool | None = None
    schema_: Raw | None = Field(None, alias="schema")


class TextOptions(OpenModel):
    """Options of the answer's text. Verbosity is ignored."""

    format: TextFormat | None = None


class ReasoningOptions(OpenModel):
    """Effort of reasoning, for templates that read it. Summaries are not made."""

    effort: Text | None = None


_MaxTokens = Annotated[int, count_of(PARAMETERS["max_tokens"]), BeforeValidator(whole)]


class ResponsesMembers(CommonMembers):
    """Body of ``POST /v1/responses``."""

    input: Input
    instructions: Text | None = None
    max_output_tokens: _MaxTokens | None = Field(None, description=PARAMETERS["max_tokens"].about)
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], at_most(limits.MAX_JSON_LIST)] | None = None
    tool_choice: TextOrObject[NamedChoice] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Text], at_most(limits.MAX_JSON_LIST)] | None = None
    metadata: dict[str, Text] | None = None
    previous_response_id: Annotated[Any, absent()] = None
    conversation: Annotated[Any, absent()] = None
    prompt: Annotated[Any, absent()] = None
    background: Annotated[Any, absent(False)] = None
    truncation: Annotated[Any, absent("disabled")] = None
    max_tool_calls: Annotated[Any, absent()] = None
    context_management: Annotated[Any, absent([])] = None
    top_logprobs: Annotated[Any, absent(0)] = None
    n: Annotated[Any, absent(1)] = None
    best_of: Annotated[Any, absent(1)] = None
    use_beam_search: Annotated[Any, absent(False)] = None
    max_tokens: Annotated[Any, absent()] = None
    return_token_ids: Annotated[Any, absent(False)] = None
    response_format: Annotated[Any, absent()] = None


_SHARED: Final[dict[str, Any]] = {
    **parameter_fields(ROWS),
    **dict.fromkeys(IGNORED, (Annotated[Any, NO_EFFECT], None)),
}
ResponsesBody: Final = create_model(
    "ResponsesBody",
    __base__=ResponsesMembers,
    **{name: made for name, made in _SHARED.items() if name not in ResponsesMembers.model_fields},
)
