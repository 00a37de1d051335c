"""Validation of a caller's protobuf message: plain values, or the error that names the bad field.

Pure: no I/O, no clock; ids and seeds come from the two callables. Cheap checks run first, so that most bad
requests cost microseconds; tokenizing comes last. A prompt of `limits.INLINE_PARSE_BYTES` or more takes
long enough (about 0.5 s for a megabyte) to belong in a thread: everything here may run in one.

Errors are those of `diptych.runtime.errors`, each with the path of the field in the request. None repeats a
value that the caller sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from diptych.parameters import PARAMETERS
from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway.adapters.adapter import Adapter
from gateway.model.images import PreparedImage, PromptImages
from gateway.model.served_model import ServedModel
from gateway.request import field_checks
from gateway.request.parsed_request import ParsedRequest
from gateway.request.resume_token import RECEIVED
from gateway.request.structured_output import structured_output
from gateway.request.validate_prompt import chat_reasoning, chat_tools, prompt_ids
from gateway.request.validate_sampling import (
    check_a_token_is_left,
    read_output_counts,
    read_sampling,
    read_token_rules,
)
from gateway.request.validate_stopping import prompt_budget, read_stopping
from gateway.request.validate_tools import constraint_of

M = TypeVar("M", bound=Message)


def parse_message(kind: type[M], data: bytes) -> M:
    """Parse the message in ``data``, for handlers registered with an identity deserializer.

    gRPC's own deserializer answers garbage with UNKNOWN or INTERNAL and its exception's text; this raises
    `InvalidParameter`. Invalid UTF-8 and nesting over protobuf's limit of 100 are garbage too.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        form = kind.DESCRIPTOR.full_name
        raise InvalidParameter("request", f"is no {form} message, or has text that is not UTF-8") from error


def skips_special(asked: pb.ResponseOptions | pb.DetokenizeRequest) -> bool:
    """Return whether control tokens are left out of texts, which is the default."""
    return asked.skip_special_tokens if asked.HasField("skip_special_tokens") else True


def parse_request(
    request: pb.GenerateRequest,
    model: ServedModel,
    *,
    header_request_id: str = "",
    adapter: Adapter | None = None,
    token_limit: int | None = None,
    lenient_json_schema: bool = False,
    images: tuple[PreparedImage, ...] = (),
    fresh_id: Callable[[], str] = lambda: secrets.token_hex(16),
    fresh_seed: Callable[[], int] = lambda: secrets.randbits(64),
) -> ParsedRequest:
    """Validate and tokenise a request.

    Args:
        request: as it came.
        model: the served model.
        header_request_id: the x-request-id metadata, used where ``request_id`` is empty.
        adapter: that ``model`` or ``lora`` names.
        token_limit: prompt and output together; smaller than the model's context where the whole KV pool is.
        images: the conversation's, in their order.
        lenient_json_schema: leave out of schemas what an output cannot be held to.
        fresh_id: makes a request id where the caller gave none.
        fresh_seed: makes a seed in [0, 2**64) where the caller gave none.

    Raises:
        InvalidParameter, UnsupportedFeature, ContextLengthExceeded, UnknownModel.
    """
    card, response, cache = model.card, request.response, request.cache
    request_id = field_checks.request_id(request.request_id, header_request_id, fresh_id)
    name = field_checks.model_name(request.model, card) if adapter is None else adapter.name
    refuse_unsupported(request)
    counts = read_output_counts(request.sampling)
    logprobs = field_checks.read_number(PARAMETERS["logprobs"], response)
    prompt_logprobs = field_checks.read_number(PARAMETERS["prompt_logprobs"], response)
    stops = read_stopping(request.stopping, card.vocab_size)
    rules = read_token_rules(request.sampling, model.tokenizer)
    check_a_token_is_left(rules, stops, card.eos_token_ids)
    sampling = read_sampling(request.sampling, rules, card.defaults, card.vocab_size, fresh_seed)
    asked = None
    if request.HasField("structured_output"):
        asked = structured_output(request.structured_output, lenient=lenient_json_schema)
    chat = request.WhichOneof("prompt") == "chat"
    tools = chat_tools(request.chat, model) if chat else None
    constrained = partial(constraint_of, tools, model.tools, asked, lenient=lenient_json_schema)
    constraint = asked if tools is None else constrained()
    if constraint is not None and not card.eos_token_ids:
        raise UnsupportedFeature(constraint.path, "this model has no end of sequence to end it with")
    interval = field_checks.read_number(PARAMETERS["stream_interval"], response)
    salt = field_checks.label(PARAMETERS["cache_salt"], cache.salt)
    session_id = field_checks.label(PARAMETERS["session_id"], request.session_id)
    field_checks.label(PARAMETERS["lora"], request.lora)
    limit = card.max_context if token_limit is None else min(card.max_context, token_limit)
    ids = prompt_ids(request, model, prompt_budget(stops, limit), tools, images)
    reasoning = chat_reasoning(ids, model, tools) if chat else None
    if reasoning is not None and tools is not None:
        constraint = constrained(begun=False)
    return ParsedRequest(
        request_id=request_id,
        model=name,
        prompt_ids=ids,
        sampling=sampling,
        max_tokens=stops.max_tokens,
        min_tokens=stops.min_tokens,
        stop=stops.stop,
        stop_token_ids=stops.stop_token_ids,
        ignore_eos=stops.ignore_eos,
        include_stop=stops.include_stop,
        time_limit_s=stops.time_limit_s,
        want_text=response.text if response.HasField("text") else True,
        want_token_ids=response.token_ids if response.HasField("token_ids") else True,
        skip_special=skips_special(response),
        stream_interval=1 if interval is None else interval,
        want_timings=response.timings if response.HasField("timings") else True,
        salt=salt,
        # Scores of prompt tokens come from computing them.
        cache_read=not cache.bypass_read and prompt_logprobs is None,
        cache_write=not cache.bypass_write,
        priority=request.priority,
        session_id=session_id,
        n=counts.n,
        best_of=counts.best_of,
        beam_width=counts.beam_width,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=response.echo_prompt,
        constraint=constraint,
        tools=tools,
        reasoning=reasoning,
        adapter=adapter,
        images=_located(ids, images, model),
    )


def _located(
    ids: Sequence[int], images: tuple[PreparedImage, ...], model: ServedModel
) -> PromptImages | None:
    """Return where the rows of a prompt's images are; None without images."""
    if not images or model.images is None:
        return None
    try:
        return model.images.locate(ids, images)
    except ValueError as error:
        raise InvalidParameter(
            "chat.messages", f"holds tokens of images beside its images: {error}"
        ) from error


def refuse_unsupported(request: pb.GenerateRequest) -> None:
    """Raise UnsupportedFeature for a field that this build does not implement, alone or beside others.

    To ignore one would answer another question. Raises InvalidParameter for received ids without a token.
    """
    # The workers search over token ids. Cut at a string afterwards, several beams would be the same text,
    # ranked by tokens that the client does not see.
    if request.stopping.stop and request.sampling.beam_width > 1:
        raise UnsupportedFeature("stopping.stop", "is not supported with beam search; stop_token_ids are")
    if request.received_token_ids and not request.resume_token:
        raise InvalidParameter(RECEIVED, "goes with resume_token only")
