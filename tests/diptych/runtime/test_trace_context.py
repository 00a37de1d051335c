from __future__ import annotations

import pytest

from diptych.runtime.trace_context import NO_TRACE, Headers, from_metadata

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("metadata", "headers"),
    [
        (None, NO_TRACE),
        ([("x-request-id", "a")], NO_TRACE),
        ([("traceparent", PARENT), ("x-request-id", "a")], (PARENT, "")),
        ([("traceparent", PARENT), ("tracestate", "a=1,b=2")], (PARENT, "a=1,b=2")),
        ([("tracestate", "a=1"), ("traceparent", PARENT), ("tracestate", "b=2")], (PARENT, "a=1,b=2")),
        ([("traceparent", b"\x00"), ("tracestate", b"\x00")], NO_TRACE),
    ],
)
def test_what_the_headers_of_a_call_name(
    metadata: list[tuple[str, str | bytes]] | None, headers: Headers
) -> None:
    assert from_metadata(metadata) == headers
