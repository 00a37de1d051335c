"""Requests of the core while they are made of a body, and the client's name of each field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

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
    "chat.tool_choice.mode": "tool_choice",
    "chat.tool_choice.parallel": "parallel_tool_calls",
    **{row.wire: row.http for row in PARAMETERS.values() if row.http},
}
_GROUPS: Final = ("sampling.", "stopping.", "response.", "chat.")
# Of tools, calls and a named choice: members of the object "function" in OpenAI's form.
_OF_FUNCTION: Final = re.compile(
    r"^(.*\b(?:tools|tool_calls)\[\d+\]|tool_choice)\.(name|description|arguments_json|parameters_json_schema)"
)
_FUNCTION: Final[Mapping[str, str]] = {
    "arguments_json": "arguments",
    "parameters_json_schema": "parameters",
}

_LIKELIEST: Final = 1e-9
"""``top_p`` that keeps one token."""


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
        if request.sampling.HasField("top_p") and request.sampling.top_p == 0.0:
            request.sampling.top_p = _LIKELIEST  # OpenAI's range begins at 0
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


class StreamUsage(NamedTuple):
    """Events of a stream that have the usage.

    Args:
        last: an event of its own after all others (``stream_options.include_usage``).
        running: each event has the usage so far (vLLM's ``continuous_usage_stats``).
    """

    last: bool = False
    running: bool = False


@dataclass(frozen=True, slots=True)
class HttpGenerateRequest:
    """HTTP request after parsing.

    Args:
        builders: one for each prompt, in the client's order.
        stream: answer with server-sent events.
        usage: the events that have it.
        logprobs: show them.
        echo: the prompt comes before the output.
        prompt_only: no output was asked for (``max_tokens`` of 0): the token that was made is not shown.
        token_ids: show them too (an extension of vLLM's).
        reasoning: show it (an extension of vLLM's).
    """

    builders: tuple[RequestBuilder, ...]
    stream: bool
    usage: StreamUsage
    logprobs: bool
    echo: bool = False
    prompt_only: bool = False
    token_ids: bool = False
    reasoning: bool = True

    @property
    def choices(self) -> int:
        """Choices for each prompt."""
        sampling = self.builders[0].request.sampling
        return sampling.n if sampling.HasField("n") else 1


def read_stream(body: CommonMembers, builder: RequestBuilder) -> StreamUsage:
    """Read ``stream_options``. For a running usage the core sends ids, which are counted."""
    options = body.stream_options
    if options is None:
        return StreamUsage()
    if not body.stream:
        raise InvalidParameter("stream_options", "needs stream")
    running = bool(options.continuous_usage_stats)
    if running:
        builder.request.response.token_ids = True
    return StreamUsage(bool(options.include_usage), running)


def param_of(path: str, names: Mapping[str, str]) -> str:
    """Return the client's name of a field that the core calls ``path`` (``sampling.top_p`` → ``top_p``)."""
    renamed = (*names.items(), *_RENAMED.items())
    for known, param in sorted(renamed, key=lambda pair: -len(pair[0])):  # the innermost one that is known
        if path == known or path.startswith((f"{known}.", f"{known}[")):
            return param + path[len(known) :]
    for group in _GROUPS:
        if path.startswith(group):
            path = path[len(group) :]
            break
    return _OF_FUNCTION.sub(lambda found: f"{found[1]}.function.{_FUNCTION.get(found[2], found[2])}", path)
