"""HTTP request as the core sees it, and the event stream that its messages go into.

Nothing is sent before the first message, or before an admitted request was silent for `HEAD_AFTER_S`: until
then an error still gets a status of its own. Later it is an event, and the stream ends without ``[DONE]``. A
stream that is silent gets comments, since clients and proxies give up on one without bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

import grpc
from aiohttp import hdrs, web

from diptych.runtime import trace_context
from diptych.runtime.errors import DiptychError, InvalidParameter, printable
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.telemetry import Attributes
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.access.quota import Charge
from gateway.call import Call
from gateway.frontends.openai import cors
from gateway.frontends.openai.answer import Answer, blocks
from gateway.frontends.openai.errors import error_object, http_error, status_of
from gateway.request.field_checks import MAX_REQUEST_ID_CHARS

REQUEST_ID: Final = "x-request-id"
TIMEOUT_MS: Final = "x-request-timeout-ms"
API_KEY: Final = "x-api-key"
"""Header of Anthropic's clients for what others send as a bearer token."""
LAST_EVENT_S: Final = 5.0
"""Seconds that a client has to take an error, and what comes before it, unread."""
_EVENT_HEADERS: Final = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
}


HEAD_AFTER_S: Final = 2.0
"""Silence after which the head of an admitted stream goes out; impatient clients wait for five seconds."""
COMMENT_AFTER_S: Final = 2.0
"""Silence after which a comment goes out."""
_COMMENT: Final = b": waiting\n\n"


class EventStream:
    """Response as server-sent events.

    A message is one write as a rule, whatever the number of its events; of several prompts' messages, those
    of one may come between large events of another.
    """

    def __init__(self, request: web.BaseRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._response = web.StreamResponse(
            headers={**_EVENT_HEADERS, **answer.version_header, **request.get(cors.HEADERS, {})}
        )
        self._written_at = 0.0  # of the loop's clock
        self._writing = 0  # writes that wait for the client
        self._comments: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        return self._response.prepared

    def name(self, request_id: str) -> None:
        """Set the id, before the first message."""
        self._answer.begin(request_id)
        for header in self._answer.id_headers:
            self._response.headers[header] = request_id

    async def send(self, prompt: int, message: pb.GenerateResponse) -> None:
        """Send a message of the ``prompt``-th prompt. Raises CancelledError when the client is gone."""
        for block in blocks(await self._answer.events(prompt, message)):
            await self._write(block)

    def keep_alive(self) -> None:
        """Begin to send the head, and then comments, while nothing else is sent; until `close`."""
        if self._comments is None:
            self._written_at = asyncio.get_running_loop().time()
            self._comments = asyncio.create_task(self._send_comments())

    async def close(self) -> None:
        """End `keep_alive`."""
        if self._comments is not None:
            self._comments.cancel()
            await asyncio.gather(self._comments, return_exceptions=True)

    async def _send_comments(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            patience = COMMENT_AFTER_S if self.started else HEAD_AFTER_S
            left = self._written_at + patience - loop.time()
            if left > 0 or self._writing:
                await asyncio.sleep(max(left, COMMENT_AFTER_S / 4))
                continue
            await self._write(_COMMENT)

    async def end(self) -> web.StreamResponse:
        """End the stream after the last message of the last prompt."""
        return await self._finish(self._answer.last_events())

    async def fail(self, error: DiptychError, names: Mapping[str, str] | None) -> web.StreamResponse:
        """End the stream with an error, after output went out; disconnect a client that does not take it."""
        event = self._answer.error_event(error_object(error, names))
        try:
            async with asyncio.timeout(LAST_EVENT_S):
                return await self._finish(event)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise asyncio.CancelledError("the client does not read") from None

    async def _write(self, events: bytes) -> None:
        self._written_at = asyncio.get_running_loop().time()
        self._writing += 1
        try:
            if not self._response.prepared:
                await self._response.prepare(self._request)
            await self._response.write(events)
        except ConnectionError as error:
            raise asyncio.CancelledError("the client is gone") from error
        finally:
            self._writing -= 1

    async def _finish(self, events: str) -> web.StreamResponse:
        try:
            await self._response.write_eof(events.encode())
        except ConnectionError as error:
            raise asyncio.CancelledError("the client is gone") from error
        return self._response


async def send_whole(
    request: web.BaseRequest, pieces: Sequence[str], headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send JSON in one response, a large one block by block.

    Raises CancelledError when the client is gone.
    """
    response = web.StreamResponse(headers={**headers, **request.get(cors.HEADERS, {})})
    response.content_type = "application/json"
    response.content_length = sum(map(len, pieces))
    try:
        await response.prepare(request)
        for block in blocks([piece] for piece in pieces):
            await response.write(block)
        await response.write_eof()
    except ConnectionError as error:
        raise asyncio.CancelledError("the client is gone") from error
    return response


class BodyCall(Call):
    """Request whose body is one of the JSON API's, from whatever it was read.

    ``stream`` is there once the body asked for one; ``names`` are as in `http_error`.
    """

    stream: EventStream | None = None
    names: Mapping[str, str] | None = None
    id_of: Callable[[str], str] = str  # set with the kind of the answer

    @property
    def response_id(self) -> str:
        return self.id_of(self.request_id)


class HttpCall(BodyCall):
    """Request to ``route``."""

    def __init__(self, route: str, request: web.BaseRequest, received_at: float) -> None:
        headers = request.headers
        super().__init__(
            f"{request.method} {route}",
            received_at=received_at,
            header_request_id=headers.get(REQUEST_ID, ""),
            trace=trace_context.from_metadata((name.lower(), value) for name, value in headers.items()),
            authorization=_credential(headers),
        )
        self._route = route
        self._verb = request.method
        self._scheme = request.scheme
        self._timeout_ms = headers.get(TIMEOUT_MS)

    def start_deadline(self) -> None:
        """Set the deadline that the header asks for. Raises InvalidParameter."""
        value = self._timeout_ms
        if value is None:
            return
        digits = value.isascii() and value.isdecimal() and len(value) < 16
        if not (digits and 0 < int(value) <= limits.MAX_TIMEOUT_MS):
            raise InvalidParameter(TIMEOUT_MS, f"must be from 1 to {limits.MAX_TIMEOUT_MS} milliseconds")
        self.deadline = self.received_at + int(value) / 1000

    async def write(self, message: pb.GenerateResponse) -> None:
        if self.stream is None:
            raise RuntimeError("a message of a stream, and no stream was asked for")
        await self.stream.send(0, message)

    def on_request_id(self, request_id: str) -> None:
        if self.stream is not None:
            self.stream.name(request_id)

    def on_admitted(self) -> None:
        if self.stream is not None:
            self.stream.keep_alive()

    @property
    def wants_call_pieces(self) -> bool:
        return self.stream is not None

    async def fail(self, error: DiptychError) -> web.StreamResponse:
        """Send the error as a response, or as the last event of one."""
        if self.stream is not None and self.stream.started:
            return await self.stream.fail(error, self.names)
        failed = http_error(error, self.names)
        return web.Response(
            status=failed.status,
            body=failed.body,
            content_type="application/json",
            headers={**failed.headers, **self.id_header()},
        )

    def id_header(self, names: Sequence[str] = (REQUEST_ID,)) -> dict[str, str]:
        return dict.fromkeys(names, printable(self.request_id)) if self.request_id else {}

    @property
    def span_attributes(self) -> Attributes:
        return {
            "http.request.method": self._verb,
            "http.route": self._route,
            "url.path": self._route,
            "url.scheme": self._scheme,
        }

    def ended(self, metrics: GatewayMetrics, code: grpc.StatusCode, duration_s: float) -> Attributes:
        started = self.stream is not None and self.stream.started
        status = 200 if started else status_of(code)
        metrics.http_duration.labels(self._route, str(status)).observe(duration_s)
        return {"http.response.status_code": status}


def _credential(headers: Mapping[str, str]) -> str:
    """Return the credential as an ``authorization`` header has it; "" without one."""
    key = headers.get(API_KEY)
    return headers.get(hdrs.AUTHORIZATION, "") or (f"Bearer {key}" if key else "")


def part_id(request_id: str, prompt: int) -> str:
    """Return the id of one prompt's request. A long one is cut; a digest then stands for the rest."""
    end = f"-{prompt}"
    if len(request_id) + len(end) > MAX_REQUEST_ID_CHARS:
        end = f"-{hashlib.sha256(request_id.encode()).hexdigest()[:16]}{end}"
        request_id = request_id[: MAX_REQUEST_ID_CHARS - len(end)]
    return request_id + end


class PromptCall(Call):
    """Prompt of several in an HTTP request, a request of its own to the core."""

    counts: ClassVar[bool] = False
    journaled: ClassVar[bool] = False

    def __init__(self, outer: BodyCall, prompt: int, charges: Charge, now: float) -> None:
        super().__init__(
            "completion of one prompt of several",
            received_at=now,
            header_request_id=part_id(outer.request_id, prompt),
            time_left_s=outer.time_left_s(now),
            trace=outer.span.headers,
            caller=outer.caller,
        )
        self._outer = outer
        self.usage = outer.usage
        self._charges = charges
        self.prompt = prompt

    @property
    def quota_usage(self) -> Charge:
        return self._charges

    def on_admitted(self) -> None:
        self._outer.on_admitted()

    @property
    def response_id(self) -> str:
        return self._outer.response_id

    async def write(self, message: pb.GenerateResponse) -> None:
        if self._outer.stream is None:
            raise RuntimeError("a message of a stream, and no stream was asked for")
        await self._outer.stream.send(self.prompt, message)

    @property
    def span_attributes(self) -> Attributes:
        return {}

    def ended(self, metrics: GatewayMetrics, code: grpc.StatusCode, duration_s: float) -> Attributes:
        return {}  # the HTTP request is counted, once
