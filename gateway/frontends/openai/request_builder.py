"""What a body asks for, in the core's words, and how the client named each thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from diptych.parameters import PARAMETERS
from diptych.v1 import inference_pb2 as pb

# Fields that are called otherwise here, whatever the request. The rest keeps its last name.
_RENAMED: Final[Mapping[str, str]] = {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "token_ids": "prompt",
    "chat.template_kwargs": "chat_template_kwargs",
    "request": "body",
    **{row.wire: row.http for row in PARAMETERS.values() if row.http},
}
_GROUPS: Final = ("sampling.", "stopping.", "response.", "chat.")
_PARTS: Final[Mapping[str, str]] = {
    ".arguments_json": ".function.arguments",
    ".parameters_json_schema": ".function.parameters",
}


@dataclass(slots=True)
class RequestBuilder:
    """One ``pb.GenerateRequest`` on its way, and ``names``: path of a field there → what the client wrote."""

    request: pb.GenerateRequest
    names: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpGenerateRequest:
    """A whole HTTP request after parsing.

    Args:
        drafts: one for each prompt, in the client's order.
        stream: answer with server-sent events.
        with_usage: a last event with the usage (``stream_options.include_usage``).
        logprobs: show them.
        echo: the prompt comes before the output.
        prompt_only: nothing was to be generated (``max_tokens`` of 0): the token that was is not shown.
        token_ids: show them too (an extension of vLLM's).
    """

    drafts: tuple[RequestBuilder, ...]
    stream: bool
    with_usage: bool
    logprobs: bool
    echo: bool = False
    prompt_only: bool = False
    token_ids: bool = False

    @property
    def choices(self) -> int:
        """Choices for each prompt."""
        sampling = self.drafts[0].request.sampling
        return sampling.n if sampling.HasField("n") else 1


def param_of(path: str, names: Mapping[str, str]) -> str:
    """The client's name of a field that the core calls ``path`` (``sampling.top_p`` → ``top_p``)."""
    for known, param in (*names.items(), *_RENAMED.items()):
        if path == known or path.startswith((f"{known}.", f"{known}[")):
            return param + path[len(known) :]
    for group in _GROUPS:
        if path.startswith(group):
            path = path[len(group) :]
            break
    for part, param in _PARTS.items():
        path = path.replace(part, param)
    return path
