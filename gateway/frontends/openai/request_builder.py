"""Requests of the core while they are made of a body, and the client's name of each field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from diptych.parameters import PARAMETERS
from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.openai.bodies import ROWS, CommonMembers

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
    """Request of the core, and ``names``: path of a field there → what the client wrote."""

    request: pb.GenerateRequest
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_body(cls, body: CommonMembers) -> RequestBuilder:
        """Start with everything but prompt, output limit, logprobs and constraint."""
        request = pb.GenerateRequest(model=body.model)
        builder = cls(request)
        for name, row in ROWS.items():
            if (value := getattr(body, name)) is not None:
                row.put(request, -value if row.inverted else value)
        if body.use_beam_search:
            builder._search_beams()
        request.response.timings = False
        request.response.token_ids = False
        return builder

    def _search_beams(self) -> None:
        """Ask as vLLM's clients do: the width is best_of, or else n."""
        sampling = self.request.sampling
        width = sampling.best_of if sampling.HasField("best_of") else sampling.n
        sampling.beam_width = width or 1
        sampling.ClearField("best_of")
        self.names["sampling.beam_width"] = "use_beam_search"
        if sampling.temperature == 0.0:
            sampling.ClearField("temperature")


@dataclass(frozen=True, slots=True)
class HttpGenerateRequest:
    """HTTP request after parsing.

    Args:
        builders: one for each prompt, in the client's order.
        stream: answer with server-sent events.
        with_usage: a last event with the usage (``stream_options.include_usage``).
        logprobs: show them.
        echo: the prompt comes before the output.
        prompt_only: no output was asked for (``max_tokens`` of 0): the token that was made is not shown.
        token_ids: show them too (an extension of vLLM's).
    """

    builders: tuple[RequestBuilder, ...]
    stream: bool
    with_usage: bool
    logprobs: bool
    echo: bool = False
    prompt_only: bool = False
    token_ids: bool = False

    @property
    def choices(self) -> int:
        """Choices for each prompt."""
        sampling = self.builders[0].request.sampling
        return sampling.n if sampling.HasField("n") else 1


def read_stream(body: CommonMembers) -> tuple[bool, bool]:
    """Return (stream, with a last event for the usage)."""
    stream, options = bool(body.stream), body.stream_options
    if options is not None and not stream:
        raise InvalidParameter("stream_options", "needs stream")
    return stream, options is not None and bool(options.include_usage)


def param_of(path: str, names: Mapping[str, str]) -> str:
    """Return the client's name of a field that the core calls ``path`` (``sampling.top_p`` → ``top_p``)."""
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
