"""The body of ``POST /v1/chat/completions`` → one request of the core."""

from __future__ import annotations

from typing import Final

from google.protobuf.struct_pb2 import Struct

from diptych.parameters import UINT32
from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.openai.chat_messages import read_messages, read_tools
from gateway.frontends.openai.request_builder import HttpGenerateRequest, RequestBuilder
from gateway.frontends.openai.response_format import read_structure
from gateway.frontends.openai.sampling_fields import read_output_limit, read_parameters, read_stream
from gateway.request.json_members import Members, string

# Of OpenAI's API, and beyond a server of text. A value that asks for nothing passes.
_ABSENT: Final[dict[str, tuple[object, ...]]] = {
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
    "verbosity": (),
    "echo": (False,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
}


def read_chat(members: dict[str, object]) -> HttpGenerateRequest:
    """Raises `InvalidParameter` or `UnsupportedFeature`, with OpenAI's name of the field."""
    body = Members(members)
    draft = RequestBuilder(pb.GenerateRequest())
    request = draft.request
    read_parameters(body, draft)
    read_structure(body, draft)
    stream, with_usage = read_stream(body)
    max_tokens = read_output_limit(body, draft, "max_completion_tokens", "max_tokens")
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    logprobs = _logprobs(body, draft)
    request.chat.SetInParent()  # also without a message
    read_messages(body, request.chat)
    read_tools(body, request.chat)
    _template(body, draft)
    token_ids = bool(body.flag("return_token_ids"))
    if token_ids:
        request.response.token_ids = True
        request.response.echo_prompt = True
    for name, harmless in _ABSENT.items():
        body.only(name, *harmless)
    body.finish()
    return HttpGenerateRequest((draft,), stream, with_usage, logprobs, token_ids=token_ids)


def _logprobs(body: Members, draft: RequestBuilder) -> bool:
    wanted = bool(body.flag("logprobs"))
    top = body.integer("top_logprobs", UINT32)
    if top is not None and not wanted:
        if top:
            raise InvalidParameter("top_logprobs", "needs logprobs")
        return False
    if wanted:
        draft.request.response.logprobs = top or 0
        draft.names["response.logprobs"] = "top_logprobs"
    return wanted


def _template(body: Members, draft: RequestBuilder) -> None:
    """What the model's chat template is told besides the messages."""
    chat = draft.request.chat
    if (add := body.flag("add_generation_prompt")) is not None:
        chat.add_generation_prompt = add
    for name, value in (body.raw("chat_template_kwargs") or {}).items():
        _template_value(chat.template_kwargs, name, value)
    effort = body.string("reasoning_effort")
    if effort is not None:
        chat.template_kwargs["reasoning_effort"] = effort
        draft.names["chat.template_kwargs.reasoning_effort"] = "reasoning_effort"


def _template_value(kwargs: Struct, name: str, value: object) -> None:
    path = "chat_template_kwargs"
    if not isinstance(value, bool | str):
        raise InvalidParameter(path, "may hold only flags and strings")
    kwargs[string(path, name)] = string(path, value) if isinstance(value, str) else value
