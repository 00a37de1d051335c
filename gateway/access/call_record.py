"""Record of a call that has ended: who called, what it used, how it ended. Never a prompt, output or key."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.access.key_file import Scope

MAX_TARGET_CHARS = 128


@dataclass(slots=True)
class CallUsage:
    """Tokens of a call, summed over its prompts, as the metrics count them."""

    model: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, model: str, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Add the tokens of one prompt."""
        self.model = model
        self.input_tokens += input_tokens
        self.cached_tokens += cached_tokens
        self.output_tokens += output_tokens


@dataclass(frozen=True, slots=True)
class CallRecord:
    """Record of one call. `tenant` and `key` are None where the caller was not authenticated."""

    scope: Scope
    method: str
    request_id: str
    tenant: str | None
    key: str | None
    """The name of the key, or the subject of a token."""
    status: str
    """gRPC's name of the status, over HTTP too."""
    reason: str | None
    """ErrorInfo's reason of a failed call."""
    http_status: int | None
    duration_s: float
    trace_id: str
    usage: CallUsage = field(default_factory=CallUsage)
    target: str = ""
    """Worker or adapter that an admin call is about."""
