"""The body of ``POST /v1/completions`` → one request of the core for each prompt.

``max_tokens`` is 16 where it is absent, as OpenAI has it. With ``echo`` it may be 0: then one token is
generated, because the workers know no other end of a prompt, and not shown.
"""

from __future__ import annotations

from typing import Final

from diptych.parameters import UINT32
from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.frontends.openai.request_builder import HttpGenerateRequest, RequestBuilder
from gateway.frontends.openai.response_format import read_structure
from gateway.frontends.openai.sampling_fields import read_output_limit, read_parameters, read_stream
from gateway.request.json_members import Members, array, string, token_ids

_DEFAULT_MAX_TOKENS: Final = 16


def read_completions(members: dict[str, object]) -> HttpGenerateRequest:
    """Raises `InvalidParameter` or `UnsupportedFeature`, with OpenAI's name of the field."""
    body = Members(members)
    draft = RequestBuilder(pb.GenerateRequest())
    read_parameters(body, draft)
    read_structure(body, draft)
    stream, with_usage = read_stream(body)
    echo = bool(body.flag("echo"))
    max_tokens = read_output_limit(body, draft, "max_tokens")
    if max_tokens == 0 and not echo:
        raise InvalidParameter("max_tokens", "must be at least 1 without echo")
    draft.request.stopping.max_tokens = _DEFAULT_MAX_TOKENS if max_tokens is None else max(max_tokens, 1)
    logprobs = body.integer("logprobs", UINT32)
    _response(draft.request.response, logprobs, echo)
    token_ids_too = bool(body.flag("return_token_ids"))
    if token_ids_too:
        draft.request.response.token_ids = True
    body.only("suffix", "")
    body.only("add_special_tokens", True)
    prompts = _prompts(body, draft)
    if token_ids_too:
        for one in prompts:  # ids are known already; with the prompt the output's text might be another
            one.request.response.echo_prompt |= one.request.WhichOneof("prompt") == "text"
    body.finish()
    return HttpGenerateRequest(
        prompts, stream, with_usage, logprobs is not None, echo, max_tokens == 0, token_ids_too
    )


def _response(response: pb.ResponseOptions, logprobs: int | None, echo: bool) -> None:
    if logprobs is not None:
        response.logprobs = logprobs
    if echo:
        response.echo_prompt = True
        if logprobs is not None:
            response.prompt_logprobs = logprobs


def _prompts(body: Members, draft: RequestBuilder) -> tuple[RequestBuilder, ...]:
    """A string, token ids, or a list of either."""
    value = body.required("prompt", body.take("prompt"))
    if isinstance(value, str):
        draft.request.text = string("prompt", value)
        return (draft,)
    if not isinstance(value, list):
        raise InvalidParameter("prompt", "must be a string, token ids, or an array of either")
    if not value:
        raise InvalidParameter("prompt", "must not be empty")
    if not isinstance(value[0], str | list):
        draft.request.token_ids.ids.extend(token_ids("prompt", array("prompt", value, limits.MAX_JSON_IDS)))
        return (draft,)
    array("prompt", value, limits.MAX_PROMPTS)
    if len(value) > 1 and draft.request.request_id:
        raise InvalidParameter("request_id", "names one request, and there are several prompts")
    shared = draft.request.SerializeToString()  # quicker to read again than a message is to copy
    if len(value) * len(shared) > limits.MAX_COPIED_BYTES:
        raise InvalidParameter("body", "has too much beside so many prompts, each of which is sent with it")
    return tuple(_one_of_many(index, prompt, shared, draft.names) for index, prompt in enumerate(value))


def _one_of_many(index: int, prompt: object, shared: bytes, names: dict[str, str]) -> RequestBuilder:
    path = f"prompt[{index}]"
    request = pb.GenerateRequest.FromString(shared)
    if isinstance(prompt, str):
        request.text = string(path, prompt)
    else:
        request.token_ids.ids.extend(token_ids(path, array(path, prompt, limits.MAX_JSON_IDS)))
    return RequestBuilder(request, {**names, "text": path, "token_ids.ids": path})
