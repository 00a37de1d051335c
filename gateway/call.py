"""The seam between the doors and the core: a request as its door gives it, and what every one is counted by.

A door speaks one protocol to the world (gRPC, OpenAI's HTTP, KServe's gRPC). For each request it

1. makes a `Call` of its own kind and opens ``with calls.account(call):``, which starts the SERVER span,
   finds out who calls (``call.caller``), counts the request, and turns whatever goes wrong into a
   `DiptychError`;
2. parses its own wire into ``pb.GenerateRequest`` inside that block, so that a parse error is counted too
   (raise `InvalidParameter` with the path of the field);
3. awaits ``generator.stream(request, call)``, which hands each message to ``call.write`` as it comes, or
   ``generator.whole(request, call)``, which returns the one message and writes nothing;
4. outside the block catches `DiptychError` and says it in its protocol's words. `error.code` is the
   canonical code (UNAVAILABLE: nothing was delivered; ABORTED: output was), `error.reason`, `metadata`,
   `violations` and `retry_after_s` are the details. `call.request_id` names the request, the caller's own
   or a fresh one; nothing else than a DiptychError or CancelledError leaves the block.

    call = MyCall("POST /v1/completions", received_at=clock(), header_request_id=…, time_left_s=…, trace=…)
    try:
        with calls.account(call):
            await generator.stream(parse(body), call)
    except DiptychError as error:
        answer(error)

What `GenerateResponse` messages look like is said in ``gateway/responses.py``. Messages of a stream
belong to the door once written: the core keeps none of them.

**The client leaves**: the door cancels the task that awaits the generator. CancelledError comes out again (do
not swallow it), and by then both workers were told to drop the request. A ``write`` that finds its connection
gone raises CancelledError too; a protocol's own exception from there would count as a bug.

**Deadlines**: ``time_left_s`` counts from ``received_at``. The core ends the request with `DeadlineExceeded`
when it passes; a protocol that also cancels the task by itself at that time (gRPC) is fine too.

**Slow readers**: ``write`` may wait; what comes meanwhile is put into one message. A request holds at most
its own max_tokens.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import grpc

from diptych.runtime.errors import DiptychError, Internal
from diptych.runtime.metrics import GatewayMetrics
from diptych.runtime.telemetry import Attributes, ServerSpan, Telemetry
from diptych.runtime.trace_context import NO_TRACE, Headers
from diptych.v1 import inference_pb2 as pb
from gateway.access.access import Access
from gateway.access.caller import Caller, Scope
from gateway.access.quota import Charge
from gateway.request.field_checks import id_from_header

REJECTIONS = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})
"""The server could not serve a request, and nothing of it was delivered."""
_NO_DEADLINE_S = 30 * 24 * 3600.0  # gRPC says "infinite" as a very large number in some versions
_CLOCK_SKEW_S = 0.02  # a protocol's own timer fires a few milliseconds off this clock
_log = logging.getLogger(__name__)


class Call(ABC):
    """One request at one door, while it runs. Times are on the gateway's monotonic clock, in seconds.

    Args:
        method: the SERVER span's name, of few values: "diptych.v1.InferenceService/Generate" or
            "POST /v1/completions".
        received_at: when it came.
        header_request_id: x-request-id as the client sent it, or ""; inside `Calls.account` what is made
            of it.
        time_left_s: until the client's deadline; None without one.
        trace: (traceparent, tracestate) as the client sent them, each possibly "".
        authorization: the credential as the client sent it, or "".
        caller: who calls, where that is known: a part of another call, or what is open to everybody.
    """

    span: ServerSpan  # there once `Calls.account` was entered
    counts: ClassVar[bool] = True  # as a call that came in; a part of one is counted with the whole

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
        endless = time_left_s is None or time_left_s >= _NO_DEADLINE_S
        self.deadline = None if endless or time_left_s is None else received_at + time_left_s

    @property
    def caller(self) -> Caller:
        """Inside `Calls.account`."""
        if self._caller is None:
            raise RuntimeError("nobody has looked who calls")
        return self._caller

    @property
    def charges(self) -> Charge:
        """What it takes of its key's quotas goes there. Default: to the key's meter."""
        return self.caller.meter

    def admit(self, access: Access, scope: Scope) -> None:
        """Find out who calls, unless that is known. Raises `Unauthenticated`, `PermissionDenied`."""
        if self._caller is None:
            self._caller = access.caller(self.authorization, scope)

    @abstractmethod
    async def write(self, message: pb.GenerateResponse) -> None:
        """Send one message of a stream. May wait for a slow client; see the module on one that is gone."""

    def on_request_id(self, request_id: str) -> None:  # noqa: B027
        """The request has its name now, before any message: for headers or trailers. Default: nothing."""

    @property
    def span_attributes(self) -> Attributes | None:
        """Of the SERVER span at its start; None: those of an RPC."""
        return None

    def ended(self, metrics: GatewayMetrics, code: grpc.StatusCode, duration_s: float) -> Attributes | None:
        """Count the call in its protocol's own metric. Returns what the SERVER span says of the answer.

        Default: ``rpc.server.call.duration``, and None, which is the RPC's status code.
        """
        metrics.call_duration.labels(self.method, code.name).observe(duration_s)
        return None

    def name(self, request_id: str) -> None:
        """The core tells the request's id."""
        self.request_id = request_id
        self.on_request_id(request_id)

    def time_left_s(self, now: float) -> float | None:
        return None if self.deadline is None else max(self.deadline - now, 0.0)

    def why_cancelled(self, now: float) -> grpc.StatusCode:
        """What a CancelledError in the handler means."""
        passed = self.deadline is not None and now >= self.deadline - _CLOCK_SKEW_S
        return grpc.StatusCode.DEADLINE_EXCEEDED if passed else grpc.StatusCode.CANCELLED


class Calls:
    """What every call has around it, whatever its door.

    Args:
        access: who has which key.
        scope: that the callers of this door's services need.
        alive: whether a live request of the tenant has an id.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        access: Access,
        scope: Scope = Scope.INFERENCE,
        alive: Callable[[str, str], bool] = lambda tenant, name: False,
    ) -> None:
        self._telemetry = telemetry
        self._metrics = metrics
        self._access = access
        self._scope = scope
        self.clock = clock
        self.running = 0
        self._alive = alive
        self._header_ids: set[tuple[str, str]] = set()
        """(tenant, id) of running calls that have it from a header."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Returns when no call is being answered."""
        await self._idle.wait()

    def admits(self, call: Call) -> bool:
        """Whether `account` will let it in: what is refused anyway need not be read first."""
        try:
            call.admit(self._access, self._scope)
        except DiptychError:
            return False
        return True

    @contextmanager
    def account(self, call: Call) -> Iterator[None]:
        """The SERVER span, the credential and the metrics of ``call``.

        Only DiptychError and CancelledError come out of it.

        Any other exception is a bug: it is logged with its traceback and becomes `Internal`, whose text is
        fixed.
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
            answer = call.ended(self._metrics, code, self.clock() - call.received_at)
            call.span.end(code, reason, answer)
            self.running -= 1
            if not self.running:
                self._idle.set()

    @contextmanager
    def _named(self, call: Call) -> Iterator[None]:
        """An id made of the x-request-id header, for this call alone as long as it runs."""
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
