"""Bodies of ``POST /tokenize`` and ``POST /detokenize``, in vLLM's forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from gateway import limits
from gateway.frontends.openai.bodies import ChatTurn, OfferedTool
from gateway.frontends.openai.body_model import BodyModel, Raw, Text, absent, at_most
from gateway.request.json_values import array, token_ids

_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _ids(value: object) -> Sequence[int]:
    return token_ids("tokens", array("tokens", value, limits.MAX_DETOKENIZE_IDS))


class TokenizeBody(BodyModel):
    """Text (`prompt`) or conversation (`messages`), with what a chat template reads besides."""

    model: Text | None = Field(None, description="Default: the served model.")
    prompt: Text | None = None
    messages: Annotated[list[ChatTurn], at_most(limits.MAX_MESSAGES)] | None = None
    tools: Annotated[list[OfferedTool], at_most(limits.MAX_JSON_LIST)] | None = None
    add_special_tokens: bool | None = Field(None, description="Of a text; default true.")
    return_token_strs: bool | None = Field(None, description="Return the text of each token.")
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Raw | None = None
    reasoning_effort: Text | None = None
    continue_final_message: Annotated[Any, absent(False)] = None
    chat_template: Annotated[Any, absent()] = None


class DetokenizeBody(BodyModel):
    """Token ids."""

    model: Text | None = Field(None, description="Default: the served model.")
    tokens: Annotated[list[int], PlainValidator(_ids), WithJsonSchema(_IDS_SCHEMA)]
