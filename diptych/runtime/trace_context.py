"""W3C trace context (https://www.w3.org/TR/trace-context/) as the pair of strings that our messages carry.

A span that is made only when its request ends must still have an id that other processes can name as
their parent, or link to, while it runs. Such ids are derived: a hash of the parent's context and a
key that both sides know. No id travels but the parent's.
"""

import hashlib
import logging
from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

Headers = tuple[str, str]
"""(traceparent, tracestate); either may be empty."""

NO_TRACE: Headers = ("", "")

_propagator = TraceContextTextMapPropagator()

# Headers that are malformed are ignored, as the standard asks. The API would log them, one line a request,
# with what a client chose to write there.
for _name in ("opentelemetry.trace.propagation.tracecontext", "opentelemetry.trace.span"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def parse(headers: Headers | None) -> SpanContext | None:
    """Return the span that the headers name; None when absent or malformed, as the standard asks."""
    if headers is None or not headers[0]:
        return None
    carrier = {TRACEPARENT: headers[0], TRACESTATE: headers[1]}
    context = trace.get_current_span(_propagator.extract(carrier)).get_span_context()
    return context if context.is_valid else None


def format_headers(context: SpanContext) -> Headers:
    flags = int(context.trace_flags) & 0xFF
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}", context.trace_state.to_header()


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> Headers:
    """Return the headers in a call's metadata, or of an HTTP request: names in lower case.

    A tracestate may come in several headers, since each proxy on the way may add one of its own.
    """
    found: dict[str, list[str]] = {TRACEPARENT: [], TRACESTATE: []}
    for key, value in metadata or ():
        if key in found and isinstance(value, str):
            found[key].append(value)
    return (found[TRACEPARENT] or [""])[-1], ",".join(found[TRACESTATE])


def derived(parent: SpanContext, key: str) -> SpanContext:
    """Return the context of the child of `parent` that is known under `key`, whichever process makes the
    span.
    """
    data = parent.trace_id.to_bytes(16, "big") + parent.span_id.to_bytes(8, "big") + key.encode()
    span_id = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
    return SpanContext(
        trace_id=parent.trace_id,
        span_id=span_id or 1,  # zero means "no span"
        is_remote=True,
        trace_flags=TraceFlags(parent.trace_flags),
        trace_state=parent.trace_state,
    )


class ReservedIds(RandomIdGenerator):
    """Random ids, but for the one span id that was reserved just before. Used from one thread."""

    def __init__(self) -> None:
        self._reserved: int | None = None

    def reserve(self, span_id: int) -> None:
        self._reserved = span_id

    def generate_span_id(self) -> int:
        span_id, self._reserved = self._reserved, None
        return super().generate_span_id() if span_id is None else span_id
