"""Contract between the frontends and the core: a `Call` is a request as its frontend received it.

A frontend speaks one protocol (gRPC, OpenAI's HTTP API, KServe's gRPC). For each request it

1. creates its own kind of `Call` and opens ``with calls.account(call):``, which starts the SERVER span,
   authenticates the caller (``call.caller``), counts the request, and turns every failure into a
   `DiptychError`;
2. parses its wire format into ``pb.GenerateRequest`` inside that block, so that a parse error is counted too
   (raise `InvalidParameter` with the path of the field);
3. awaits ``generator.stream(request, call)``, which passes each message to ``call.write`` as it comes, or
   ``generator.collect(request, call)``, which returns the one message and writes nothing;
4. outside the block catches `DiptychError` and reports it in its own protocol. `error.code` is the canonical
   code (UNAVAILABLE: nothing was delivered; ABORTED: output was), `error.reason`, `metadata`, `violations`
   and `retry_after_s` are the details. `call.request_id` is the request's id, the caller's own or a new one.
   Only DiptychError and CancelledError leave the block.

    call = MyCall("POST /v1/completions", received_at=clock(), header_request_id=…, time_left_s=…, trace=…)
    try:
        with calls.account(call):
            await generator.stream(parse(body), call)
    except DiptychError as error:
        answer(error)

``gateway/responses.py`` describes the `GenerateResponse` messages. Messages of a stream belong to the
frontend once written: the core keeps none of them.

**Cancellation**: when the client disconnects, the frontend cancels the task that awaits the generator.
CancelledError comes out again (do not swallow it), and by then both workers have been sent a cancellation. A
``write`` that finds its connection closed raises CancelledError too; a protocol's own exception from there
would count as a bug.

**Deadlines**: ``time_left_s`` counts from ``received_at``. The core ends the request with `DeadlineExceeded`
when it passes; a protocol that also cancels the task by itself at that time (gRPC) is fine too.

**Slow readers**: ``write`` may wait; output that comes meanwhile is put into one message, or a few. A
``write`` that waits is cancelled when its limits are exceeded (`gateway.slow_readers`) or its request has
failed; then `SlowReader`, or the request's error, comes out of the generator, with all that the request had
given back. The frontend sends it without waiting for long, since such a client takes nothing, and ends the
stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import grpc

from diptych.runtime.errors import REJECTIONS, DiptychError, Internal, QueueFull
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.heap_trim import HeapTrim
from diptych.runtime.telemetry import Attributes, ServerSpan, Telemetry
from diptych.runtime.trace_context import NO_TRACE, Headers
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.access.access import Access, Caller
from gateway.access.call_record import MAX_TARGET_CHARS, CallRecord, CallUsage
from gateway.access.journal import Journal
from gateway.access.key_file import Scope
from gateway.access.quota import Charge
from gateway.admission.wait import FIRST_RETRY_S
from gateway.request.field_checks import id_from_header

_NO_DEADLINE_S = 30 * 24 * 3600.0  # some versions of gRPC give "infinite" as a very large number
_CLOCK_SKEW_S = 0.02  # a protocol's own timer differs from this clock by a few milliseconds
_log = logging.getLogger(__name__)


class Call(ABC):
    """Request of one frontend, while it runs. Times are on the gateway's monotonic clock, in seconds.

    Args:
        method: the SERVER span's name, of few values: "diptych.v1.InferenceService/Generate" or
            "POST /v1/completions".
        received_at: time of its arrival.
        header_request_id: x-request-id as the client sent it, or ""; inside `Calls.account` the id made
            from it.
        time_left_s: until the client's deadline; None without one.
        trace: (traceparent, tracestate) as the client sent them, each possibly "".
        authorization: the credential as the client sent it, or "".
        caller: the authenticated caller, where it is known: of a part of another call, or of an open method.
    """

    span: ServerSpan  # set by `Calls.account`
    counts: ClassVar[bool] = True  # False for a part of another call, which is counted already
    journaled: ClassVar[bool] = True  # False for a part whose tokens are the other call's

    def __init__(
        self,
        method: str,
        *,
        received_at: float,
        header_request_id: str = "",
        time_left_s: float | None = None,
        trace: Headers = NO_TRACE,
        authorization: str = "",
        caller: Caller | None = None,
    ) -> None:
        self.method = method
        self.authorization = authorization
        self._caller = caller
        self.received_at = received_at
        self.header_request_id = header_request_id
        self.trace = trace
        self.request_id = header_request_id
        self.usage = CallUsage()
        self.target = ""  # what an admin call is about
        endless = time_left_s is None or time_left_s >= _NO_DEADLINE_S
        self.deadline = None if endless or time_left_s is None else received_at + time_left_s

    @property
    def caller(self) -> Caller:
        """The authenticated caller; available inside `Calls.account`."""
        if self._caller is None:
            raise RuntimeError("the caller is not authenticated yet")
        return self._caller

    @property
    def known_caller(self) -> Caller | None:
        """The authenticated caller; None before, and where it was refused."""
        return self._caller

    @property
    def quota_usage(self) -> Charge:
        """The quota that this call is charged to; by default its key's."""
        return self.caller.quota_usage

    def admit(self, access: Access, scope: Scope) -> None:
        """Authenticate the caller, unless it is known. Raises `Unauthenticated`, `PermissionDenied`."""
        if self._caller is None:
            self._caller = access.caller(self.authorization, scope)

    @abstractmethod
    async def write(self, message: pb.GenerateResponse) -> None:
        """Send one message of a stream. May wait for a slow client; see the module on disconnects."""

    @property
    def response_id(self) -> str:
        """The id of the answer as the client sees it; by default the request's."""
        return self.request_id

    def on_request_id(self, request_id: str) -> None:  # noqa: B027
        """Handle the request's id, before any message: for headers or trailers. Default: nothing."""

    def on_admitted(self) -> None:  # noqa: B027
        """Handle the request's admission; only workers are waited for now. May be called again."""

    @property
    def wants_call_pieces(self) -> bool:
        """True where tool calls come in pieces: name and id first, then arguments as they are written."""
        return False

    @property
    def span_attributes(self) -> Attributes | None:
        """Attributes of the SERVER span at its start; None: those of an RPC."""
        return None

    def ended(self, metrics: GatewayMetrics, code: grpc.StatusCode, duration_s: float) -> Attributes | None:
        """Count the call in its protocol's own metric. Return the SERVER span's attributes of the answer.

        Default: ``rpc.server.call.duration``, and None, which is the RPC's status code.
        """
        metrics.call_duration.labels(self.method, code.name).observe(duration_s)
        return None

    def set_request_id(self, request_id: str) -> None:
        """Set the id that the core gave the request."""
        self.request_id = request_id
        self.on_request_id(request_id)

    def time_left_s(self, now: float) -> float | None:
        return None if self.deadline is None else max(self.deadline - now, 0.0)

    def why_cancelled(self, now: float) -> grpc.StatusCode:
        """Return the status of a CancelledError in the handler."""
        passed = self.deadline is not None and now >= self.deadline - _CLOCK_SKEW_S
        return grpc.StatusCode.DEADLINE_EXCEEDED if passed else grpc.StatusCode.CANCELLED


class RefusalLog:
    """Log of refused requests: the first one at once, then a line with their number every `EVERY_S`."""

    EVERY_S = 10.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged_at = -math.inf

    def add(self, reason: str) -> None:
        """Count a refusal, and log those since the last line if it is time."""
        self._counts[reason] += 1
        now = self._clock()
        if now - self._logged_at >= self.EVERY_S:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(self._counts.items()))
            _log.warning("requests refused since the last such line: %s", counts)
            self._counts.clear()
            self._logged_at = now


class Calls:
    """Authentication, accounting and tracing around every call of a frontend.

    Args:
        access: the callers by API key.
        scope: required of the callers of this frontend's services.
        alive: returns whether a live request of (tenant, id) exists.
        write_timeout_s: in which a client must take what is sent to it.
        journal: account of ended calls; None: there is none.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        access: Access,
        scope: Scope = Scope.INFERENCE,
        alive: Callable[[str, str], bool] = lambda tenant, name: False,
        write_timeout_s: float = 60.0,
        heap: HeapTrim | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.write_timeout_s = write_timeout_s
        self.heap = heap or HeapTrim()
        self._journal = journal
        self._telemetry = telemetry
        self._metrics = metrics
        self._access = access
        self._scope = scope
        self.clock = clock
        self.running = 0
        self._refusals = RefusalLog(clock)
        self._alive = alive
        self._header_ids: set[tuple[str, str]] = set()
        """(tenant, id) of running calls with an id from a header."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Wait until no call is running."""
        await self._idle.wait()

    def admits(self, call: Call) -> bool:
        """Return whether `account` will admit ``call``: the body of a refused call need not be read."""
        try:
            call.admit(self._access, self._scope)
        except DiptychError:
            return False
        return True

    @contextmanager
    def account(self, call: Call) -> Iterator[None]:
        """Authenticate ``call``, trace it in a SERVER span and count it in the metrics.

        Raises DiptychError and CancelledError only. Any other exception is a bug: it is logged with its
        traceback and becomes `Internal`, whose text is fixed.
        """
        call.span = self._telemetry.start_server_span(
            call.method,
            call.trace,
            call.span_attributes,
            start_s=call.received_at,
            part=not call.counts,
        )
        code, reason = grpc.StatusCode.OK, None
        self.running += 1
        self._idle.clear()
        try:
            if self.running > limits.MAX_CALLS and call.counts:
                raise QueueFull(FIRST_RETRY_S)
            call.admit(self._access, self._scope)
            with self._named(call):
                yield
        except asyncio.CancelledError:
            code = call.why_cancelled(self.clock())
            raise
        except DiptychError as error:
            code, reason = error.code, error.reason
            raise
        except Exception as error:
            _log.exception("request %s: unexpected error", call.request_id)
            code, reason = grpc.StatusCode.INTERNAL, Internal.reason
            raise Internal() from error
        finally:
            if reason is not None and code in REJECTIONS and call.counts:
                self._metrics.rejections.labels(reason).inc()
                self._refusals.add(reason)
            duration_s = self.clock() - call.received_at
            answer = call.ended(self._metrics, code, duration_s)
            call.span.end(code, reason, answer)
            if self._journal is not None and call.journaled:
                self._journal.ended(self._record(call, code, reason, answer, duration_s))
            self.running -= 1
            if not self.running:
                self._idle.set()

    def _record(
        self,
        call: Call,
        code: grpc.StatusCode,
        reason: str | None,
        answer: Attributes | None,
        duration_s: float,
    ) -> CallRecord:
        caller = call.known_caller
        http_status = (answer or {}).get("http.response.status_code")
        return CallRecord(
            scope=self._scope,
            method=call.method,
            request_id=call.request_id,
            tenant=None if caller is None else caller.tenant,
            key=None if caller is None else caller.quota_usage.name,
            status=code.name,
            reason=reason,
            http_status=http_status if isinstance(http_status, int) else None,
            duration_s=duration_s,
            trace_id=call.span.trace_id,
            usage=call.usage,
            target=call.target[:MAX_TARGET_CHARS],
        )

    @contextmanager
    def _named(self, call: Call) -> Iterator[None]:
        """Give the call an id made from its x-request-id header, unique while it runs."""
        if not call.header_request_id:
            yield
            return
        tenant = call.caller.tenant

        def taken(name: str) -> bool:
            return (tenant, name) in self._header_ids or self._alive(tenant, name)

        name = id_from_header(call.header_request_id, taken)
        call.header_request_id = call.request_id = name
        self._header_ids.add((tenant, name))
        try:
            yield
        finally:
            self._header_ids.discard((tenant, name))
