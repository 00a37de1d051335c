"""Bodies of ``POST /v1/completions`` and ``POST /v1/chat/completions``, as pydantic models.

Scalar members come from the table of `diptych.parameters`, under OpenAI's names or else vLLM's. Prompts and
constraints, which have several forms, are `Any` here and read by the builders of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
)

from diptych.parameters import PARAMETERS
from gateway import limits
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
    parameter_fields,
    unicode_text,
    unsupported,
)
from gateway.request.json_values import whole

ROWS: Final = {row.http: row for row in PARAMETERS.values() if row.http and not row.own_reader}
"""Rows of the table by the member that both bodies have."""
# Accepted and without effect: they concern OpenAI's own books and storage.
IGNORED: Final = ("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_retention")
CONSTRAINTS: Final[Mapping[str, dict[str, Any]]] = {
    "json": {"description": "JSON schema, or its text.", "anyOf": [{"type": "object"}, {"type": "string"}]},
    "json_object": {"description": "Any JSON object.", "type": "boolean"},
    "regex": {"description": "Regular expression.", "type": "string"},
    "choice": {"description": "One of these texts.", "type": "array", "items": {"type": "string"}},
    "grammar": {"description": "Grammar in llama.cpp's notation, GBNF.", "type": "string"},
}
"""Members of vLLM's ``structured_outputs``; with ``guided_`` before them its older ones."""


NO_EFFECT: Final = WithJsonSchema({"description": "Accepted, to no effect."})


def _constraint(name: str) -> WithJsonSchema:
    return WithJsonSchema(CONSTRAINTS[name])


def _described(name: str) -> Any:
    return Field(None, description=PARAMETERS[name].about)


def _function_only(kind: str) -> str:
    if kind != "function":
        raise unsupported("must be function")
    return kind


_PART_TYPES: Final = ("text", "image_url", "refusal", "thinking", "redacted_thinking", "reasoning")


def _part_type(kind: str) -> str:
    if kind not in _PART_TYPES:
        raise unsupported("must be text or image_url: this server reads nothing else")
    return kind


def _text_or_nothing(value: object) -> str | None:
    """Return a text; clients also keep objects under the same name, which no template reads."""
    return unicode_text(value) if isinstance(value, str) else None


FunctionType = Annotated[Text, AfterValidator(_function_only)]


class StreamOptions(OpenModel):
    """Options of a stream. Others are ignored: they concern how a stream is sent and not what is generated.

    Obfuscation pads against eavesdroppers of TLS, which is not in use here.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Each event has the usage so far.")


class JsonSchemaFormat(BodyModel):
    """Schema of an answer. It always holds, strict or not."""

    name: Text | None = None
    description: Text | None = None
    strict: bool | None = None
    schema_: Raw = Field(alias="schema")


class ResponseFormat(BodyModel):
    """Form of an answer: ``text``, ``json_object`` or ``json_schema``.

    Some clients write the schema beside the type, with either of the last two.
    """

    type: Text
    json_schema: JsonSchemaFormat | None = None
    schema_: Raw | None = Field(None, alias="schema")


class StructuredOutputs(BodyModel):
    """Constraint on the output, in vLLM's form."""

    json_: Annotated[Any, _constraint("json")] = Field(None, alias="json")
    json_object: Annotated[Any, _constraint("json_object")] = None
    regex: Annotated[Any, _constraint("regex")] = None
    choice: Annotated[Any, _constraint("choice")] = None
    grammar: Annotated[Any, _constraint("grammar")] = None


class CalledFunction(OpenModel):
    """Function that an earlier answer called."""

    name: Text
    arguments: Text | None = None


class CallOfTool(OpenModel):
    """Call in an assistant's turn."""

    type: FunctionType | None = None
    function: CalledFunction
    id: Text | None = None


class ImageUrl(OpenModel):
    """Image as a data URL, ``data:image/png;base64,…``, or at an http or https URL of an allowed host."""

    url: Text
    detail: Text | None = None


class ContentPart(OpenModel):
    """Part of a turn's content: ``text``, an image, what a model refused with, or what it thought."""

    type: Annotated[Text, AfterValidator(_part_type)]
    text: Text | None = None
    image_url: ImageUrl | None = None
    refusal: Text | None = None
    thinking: Text | None = None


class ChatTurn(OpenModel):
    """Message of a chat. ``reasoning`` is the newer name of ``reasoning_content``."""

    role: Text
    content: TextOrParts[ContentPart] | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: Annotated[list[CallOfTool], at_most(limits.MAX_JSON_LIST)] | None = None
    refusal: Text | None = None
    reasoning_content: Annotated[Any, PlainValidator(_text_or_nothing)] = None
    reasoning: Annotated[Any, PlainValidator(_text_or_nothing)] = None
    audio: Annotated[Any, absent()] = None
    function_call: Annotated[Any, absent()] = None


class ToolFunction(OpenModel):
    """Function that the model may call. Forced calls always hold to their schema, strict or not."""

    name: Text
    description: Text | None = None
    parameters: Raw | None = None


class OfferedTool(OpenModel):
    """Tool that the model may call."""

    type: FunctionType | None = None
    function: ToolFunction


class NamedFunction(OpenModel):
    """Name of the function to call."""

    name: Text


class NamedTool(OpenModel):
    """Tool that the model must call."""

    type: FunctionType | None = None
    function: NamedFunction


_WHOLE: Final = BeforeValidator(whole)
_MaxTokens = Annotated[int, count_of(PARAMETERS["max_tokens"]), _WHOLE]
_EchoMaxTokens = Annotated[int, count_of(PARAMETERS["max_tokens"], ", or 0 with echo"), _WHOLE]
_Logprobs = Annotated[int, count_of(PARAMETERS["logprobs"]), _WHOLE]


class CommonMembers(BodyModel):
    """Members of both bodies that are no rows of the table."""

    model: Text
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    use_beam_search: bool | None = _described("beam_width")
    max_tokens: _MaxTokens | None = _described("max_tokens")
    return_token_ids: bool | None = _described("return_token_ids")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Annotated[Any, _constraint("json")] = None
    regex: Annotated[Any, _constraint("regex")] = None
    ebnf: Annotated[Any, _constraint("grammar")] = None


PROMPT_SCHEMA: Final = {
    "description": "Text, token ids, or a list of either.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
    ],
}


class CompletionsMembers(CommonMembers):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    echo: bool | None = _described("echo")
    max_tokens: _EchoMaxTokens | None = _described("max_tokens")
    logprobs: _Logprobs | None = _described("logprobs")
    suffix: Annotated[Any, absent("")] = None
    add_special_tokens: Annotated[Any, absent(True)] = None


class ChatMembers(CommonMembers):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatTurn], at_most(limits.MAX_MESSAGES)]
    max_completion_tokens: _MaxTokens | None = _described("max_tokens")
    logprobs: bool | None = Field(None, description="Returns the logprob of each token.")
    top_logprobs: _Logprobs | None = _described("logprobs")
    tools: Annotated[list[OfferedTool], at_most(limits.MAX_JSON_LIST)] | None = None
    tool_choice: TextOrObject[NamedTool] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Raw | None = None
    reasoning_effort: Text | None = None
    include_reasoning: bool | None = Field(None, description="False: reasoning is left out of the answer.")
    # Of OpenAI's API, and beyond a server of text.
    modalities: Annotated[Any, absent(["text"])] = None
    audio: Annotated[Any, absent()] = None
    prediction: Annotated[Any, absent()] = None
    web_search_options: Annotated[Any, absent()] = None
    functions: Annotated[Any, absent([])] = None
    function_call: Annotated[Any, absent("none", "auto")] = None  # of no functions
    verbosity: Annotated[Any, absent("medium")] = None
    thinking: Annotated[Any, absent({"type": "disabled"})] = None
    think: Annotated[Any, absent(False)] = None
    reasoning: Annotated[Any, absent({}, {"effort": "none"}, {"enabled": False})] = None
    separate_reasoning: Annotated[Any, absent(True)] = None
    stream_reasoning: Annotated[Any, absent(True)] = None
    documents: Annotated[Any, absent([])] = None
    media_io_kwargs: Annotated[Any, absent({})] = None
    mm_processor_kwargs: Annotated[Any, absent({})] = None
    echo: Annotated[Any, absent(False)] = None
    continue_final_message: Annotated[Any, absent(False)] = None
    add_special_tokens: Annotated[Any, absent(False)] = None


# Members of other servers that are not implemented, with the values that ask for nothing.
NOTHING_ASKED: Final[Mapping[str, tuple[object, ...]]] = {
    "detokenize": (True,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "prompt_logprobs": (0,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "bad_words_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "no_stop_trim": (False,),
    "lora_path": ("",),
    "cache_prompt": (True,),
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "top_a": (0.0,),
    "mirostat": (0,),
    "dynatemp_range": (0.0,),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
}
_SHARED: Final[dict[str, Any]] = {
    **{name: (Annotated[Any, absent(*values)], None) for name, values in NOTHING_ASKED.items()},
    **parameter_fields(ROWS),
    **{f"guided_{name}": (Annotated[Any, _constraint(name)], None) for name in CONSTRAINTS},
    **dict.fromkeys(IGNORED, (Annotated[Any, NO_EFFECT], None)),
}
CompletionsBody: Final = create_model("CompletionsBody", __base__=CompletionsMembers, **_SHARED)
ChatBody: Final = create_model("ChatBody", __base__=ChatMembers, **_SHARED)
