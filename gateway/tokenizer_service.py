"""The calls that need no worker: Tokenize, Detokenize, and the names in ListModels and GetModel.

Messages in, plain values out; the service makes the responses. Errors as in `gateway.request.validation`.
"""

from __future__ import annotations

from typing import NamedTuple

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.model.served_model import ServedModel
from gateway.request import field_checks
from gateway.request.validate_prompt import chat_parts, chat_tools, check_text, given_ids
from gateway.request.validation import skips_special


class Tokenized(NamedTuple):
    """``tokens`` and ``offsets`` are empty unless asked for; an offset is [start, end) in characters."""

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]


def tokenize(request: pb.TokenizeRequest, model: ServedModel) -> Tokenized:
    """The ids that a generation request with the same prompt would run on."""
    field_checks.model_name(request.model, model.card)
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return _tokenize_text(request, model)
    if kind != "chat":
        raise InvalidParameter("prompt", "one of text and chat is required")
    if request.add_special_tokens:
        raise UnsupportedFeature("add_special_tokens", "the chat template writes its own special tokens")
    if request.return_offsets:
        raise UnsupportedFeature("return_offsets", "a chat prompt has no text to give positions in")
    ids = model.tokenizer.encode_parts(chat_parts(request.chat, model, chat_tools(request.chat, model)))
    tokens = [model.tokenizer.token_text(token_id) for token_id in ids] if request.return_tokens else []
    return Tokenized(ids, tokens, [])


def detokenize(request: pb.DetokenizeRequest, model: ServedModel) -> str:
    """No ids are no text, which is no error."""
    field_checks.model_name(request.model, model.card)
    if len(request.token_ids) > limits.MAX_DETOKENIZE_IDS:
        raise InvalidParameter("token_ids", f"must have at most {limits.MAX_DETOKENIZE_IDS} ids")
    skip_special = skips_special(request)
    if not request.token_ids:
        return ""
    ids = given_ids("token_ids", request.token_ids, model.card.vocab_size, budget=None)
    return model.tokenizer.decode(ids, skip_special)


def check_list_models(request: pb.ListModelsRequest) -> None:
    """One page holds every model, so no page token was ever given out."""
    if request.page_size < 0:
        raise InvalidParameter("page_size", "must not be negative")
    if request.page_token:
        raise InvalidParameter("page_token", "is not one that this server gave")


def _tokenize_text(request: pb.TokenizeRequest, model: ServedModel) -> Tokenized:
    check_text("text", request.text)
    add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    found = model.tokenizer.encode_with_offsets(request.text, add_special)
    return Tokenized(
        found.ids,
        found.tokens if request.return_tokens else [],
        found.offsets if request.return_offsets else [],
    )
