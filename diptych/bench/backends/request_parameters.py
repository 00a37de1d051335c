"""Parameters that all requests of a benchmark share, besides their prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Asking:
    """Parameters of requests.

    `model` None asks for the server's first one. `ignore_eos` makes answers as long as they should be.

    `extra_body` is merged into the JSON of an HTTP request; a key with None is taken out of it. `on_output`
    is called with the moment of each message with output, for callers that cannot wait for the end of an
    answer.
    """

    model: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    on_output: Callable[[float], None] | None = None
