"""Body of ``POST /v1/completions`` → one request of the core for each prompt.

``max_tokens`` is 16 where it is absent, as OpenAI has it. With ``echo`` it may be 0: then one token is
generated, because the workers know no other end of a prompt, and not shown.
"""

from __future__ import annotations

from typing import Any, Final

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.frontends.openai.bodies import CompletionsBody
from gateway.frontends.openai.body_model import validate_members
from gateway.frontends.openai.request_builder import HttpGenerateRequest, RequestBuilder, read_stream
from gateway.frontends.openai.response_format import put_constraint
from gateway.request.json_values import array, string, token_ids

_DEFAULT_MAX_TOKENS: Final = 16


def read_completions(members: dict[str, Any]) -> HttpGenerateRequest:
    """Build the requests. Raises InvalidParameter or UnsupportedFeature, with OpenAI's name of the field."""
    body = validate_members(CompletionsBody, members)
    builder = RequestBuilder.from_body(body)
    put_constraint(body, builder)
    usage = read_stream(body, builder)
    echo, max_tokens = bool(body.echo), body.max_tokens
    if max_tokens == 0 and not echo:
        raise InvalidParameter("max_tokens", "must be at least 1 without echo")
    builder.request.stopping.max_tokens = _DEFAULT_MAX_TOKENS if max_tokens is None else max(max_tokens, 1)
    _put_response(builder.request.response, body.logprobs, echo)
    show_ids = bool(body.return_token_ids)
    if show_ids:
        builder.request.response.token_ids = True
    prompts = _split_prompts(body.prompt, builder)
    if show_ids:
        for one in prompts:  # ids are known already; with the prompt the output's text might be another
            one.request.response.echo_prompt |= one.request.WhichOneof("prompt") == "text"
    scored = body.logprobs is not None
    return HttpGenerateRequest(
        prompts, bool(body.stream), usage, scored, echo, max_tokens == 0, token_ids=show_ids
    )


def _put_response(response: pb.ResponseOptions, logprobs: int | None, echo: bool) -> None:
    if logprobs is not None:
        response.logprobs = logprobs
    if echo:
        response.echo_prompt = True
        if logprobs is not None:
            response.prompt_logprobs = logprobs


def _split_prompts(prompt: object, builder: RequestBuilder) -> tuple[RequestBuilder, ...]:
    """Read a string, token ids, or a list of either."""
    if prompt is None:
        raise InvalidParameter("prompt", "is required")
    if isinstance(prompt, str):
        builder.request.text = string("prompt", prompt)
        return (builder,)
    if not isinstance(prompt, list):
        raise InvalidParameter("prompt", "must be a string, token ids, or an array of either")
    if not prompt:
        raise InvalidParameter("prompt", "must not be empty")
    if not isinstance(prompt[0], str | list):
        builder.request.token_ids.ids.extend(
            token_ids("prompt", array("prompt", prompt, limits.MAX_JSON_IDS))
        )
        return (builder,)
    array("prompt", prompt, limits.MAX_PROMPTS)
    if len(prompt) > 1 and builder.request.request_id:
        raise InvalidParameter("request_id", "names one request, and there are several prompts")
    shared = builder.request.SerializeToString()  # quicker to read again than a message is to copy
    if len(prompt) * len(shared) > limits.MAX_COPIED_BYTES:
        raise InvalidParameter("body", "has too much beside so many prompts, each of which is sent with it")
    return tuple(_one_of_many(index, one, shared, builder.names) for index, one in enumerate(prompt))


def _one_of_many(index: int, prompt: object, shared: bytes, names: dict[str, str]) -> RequestBuilder:
    path = f"prompt[{index}]"
    request = pb.GenerateRequest.FromString(shared)
    if isinstance(prompt, str):
        request.text = string(path, prompt)
    else:
        request.token_ids.ids.extend(token_ids(path, array(path, prompt, limits.MAX_JSON_IDS)))
    return RequestBuilder(request, {**names, "text": path, "token_ids.ids": path})
