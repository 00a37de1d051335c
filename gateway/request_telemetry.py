"""Spans and metrics of a generation request, emitted at its end.

Nothing here runs while tokens flow. The span of the operation (`chat {model}` or `text_completion {model}`)
is the parent of the workers' spans; its id is derived from the SERVER span before it exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.runtime.errors import Cancelled, DeadlineExceeded
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.metrics import PROVIDER
from diptych.runtime.telemetry import AttributeValue, PhaseSpan, Telemetry
from diptych.v1 import inference_pb2 as pb
from gateway.attempt.types import TEXT_ROLES, Cause, FinishReason, Role
from gateway.call import Call
from gateway.responses import decode_s
from gateway.session.request_driver import RequestDriver
from gateway.session.states import State
from gateway.worker_pool.local_prefill import FALLBACK, LOCAL
from gateway.worker_pool.router import POLICIES, REASONS

OPERATION_KEY = "operation"
CANCELLED = FinishReason.CANCELLED.value
FAILED = "error"
"""Values of `reason` of choices that did not finish."""
_BY_CLIENT = frozenset({Cancelled.reason, DeadlineExceeded.reason})


@dataclass(slots=True)
class RequestTelemetry:
    """Record of a request, filled while it runs and emitted at its end.

    ``tokenized`` and ``grammar_checked`` are (start, end) on the gateway's monotonic clock. ``queued``: the
    request was not refused on arrival.
    """

    call: Call
    operation: str  # chat or text_completion
    model: str = ""
    model_digest: str = ""
    tokenized: tuple[float, float] | None = None
    grammar_checked: tuple[float, float] | None = None
    driver: RequestDriver | None = None
    queued: bool = False

    def emit(self, telemetry: Telemetry, metrics: GatewayMetrics, error: str | None, now: float) -> None:
        """Emit spans and update metrics. ``error``: the ErrorInfo reason, or a cancellation's code."""
        if telemetry.enabled:
            telemetry.emit_phases(self.call.span.headers, [self._operation_span(error, now)])
        if self.driver is not None:
            self._count(metrics, self.driver, error, now)

    def _operation_span(self, error: str | None, now: float) -> PhaseSpan:
        return PhaseSpan(
            f"{self.operation} {self.model}".rstrip(),
            self.call.received_at,
            now,
            attributes=self._attributes(now),
            error=error,
            key=OPERATION_KEY,
            children=tuple(self._children(error, now)),
        )

    def _children(self, error: str | None, now: float) -> list[PhaseSpan]:
        """Return the spans of the gateway's own phases; an error is set on the active one."""
        spans = []
        if self.tokenized is not None:
            spans.append(PhaseSpan("tokenize", *self.tokenized))
        if self.grammar_checked is not None:
            spans.append(PhaseSpan("grammar.check", *self.grammar_checked))
        if self.driver is None:
            return spans
        state = self.driver.state
        failed_in = state.phase if error is not None else None
        (_, queued_at), *moved = state.choices[0].transitions  # all choices wait together
        failed = error if failed_in is State.QUEUED else None
        spans.append(PhaseSpan("admission.wait", queued_at, moved[0][1] if moved else now, error=failed))
        for route in self.driver.routes:
            attributes = {} if route.placement is None else dict(route.placement.attributes)
            failed = error if failed_in is State.ROUTING and route.placement is None else None
            spans.append(PhaseSpan("route", route.start, route.end, attributes=attributes, error=failed))
        return spans

    def _attributes(self, now: float) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": PROVIDER,
        }
        if self.model:
            attributes |= {"gen_ai.request.model": self.model, "diptych.model.digest": self.model_digest}
        caller = self.call.known_caller
        if caller is not None and caller.tenant:
            attributes |= {"diptych.tenant": caller.tenant, "diptych.key.name": caller.quota_usage.name}
        driver = self.driver
        if driver is None:
            return attributes
        request, phases = driver.job.request, driver.phases
        attributes |= {
            "gen_ai.response.id": self.call.response_id,
            "gen_ai.response.model": self.model,
            "gen_ai.request.max_tokens": driver.job.max_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.request.top_k": request.sampling.top_k,
            "gen_ai.request.frequency_penalty": request.sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": request.sampling.presence_penalty,
            "gen_ai.usage.input_tokens": driver.job.prompt_tokens,
            "gen_ai.usage.output_tokens": driver.billed,
            "gen_ai.usage.cache_read.input_tokens": driver.cached_tokens or 0,
            "gen_ai.latency.e2e": now - self.call.received_at,
            "gen_ai.latency.time_in_queue": driver.admission_s + phases.prefill_queue + phases.grant_wait,
            "gen_ai.latency.time_in_model_prefill": phases.prefill,
            "gen_ai.latency.time_in_model_decode": decode_s(driver, phases),
            "diptych.attempts": driver.state.attempts - driver.state.refused,
            "diptych.prefill.local": phases.local_prefills > 0,
            "diptych.preemptions": driver.state.preemptions,
        }
        if driver.first_token_at is not None:
            attributes["gen_ai.latency.time_to_first_token"] = driver.first_token_at - self.call.received_at
        if len(driver.outputs) > 1:
            attributes["gen_ai.request.choice.count"] = len(driver.outputs)
        if driver.output_buffer.complete:
            finished = sorted(driver.output_buffer.finished.items())
            attributes["gen_ai.response.finish_reasons"] = [reason.value for _, reason in finished]
        return attributes

    def _count(self, metrics: GatewayMetrics, driver: RequestDriver, error: str | None, now: float) -> None:
        request = self.operation, PROVIDER, self.model
        metrics.request_duration.labels(*request, error or "").observe(now - self.call.received_at)
        # Under overload most requests are refused on arrival; hit rate and waits describe the others.
        given = any(route.placement is not None for route in driver.routes)
        cached = driver.cached_tokens or 0
        self.call.usage.add(self.model, driver.job.prompt_tokens if given else 0, cached, driver.generated)
        if given:
            metrics.input_tokens.inc(driver.job.prompt_tokens)
            metrics.prompt_length.observe(driver.job.prompt_tokens)
            _count_phases(metrics, driver)
        metrics.cached_input_tokens.inc(cached)
        metrics.output_tokens.inc(driver.generated)
        if self.queued:
            metrics.phases["admission"].observe(driver.admission_s)
            _count_choices(metrics, driver, error)
        first, last = driver.first_token_at, driver.last_token_at
        if first is not None and last is not None:
            metrics.time_to_first_token.labels(*request).observe(first - self.call.received_at)
            per_output = driver.generated / len(driver.outputs)
            if per_output > 1:
                metrics.time_per_output_token.labels(*request).observe((last - first) / (per_output - 1))
        for cause, count in driver.state.retries.items():
            metrics.retries.labels(cause.value).inc(count)
        for route in driver.routes:
            if route.placement is not None:
                metrics.route_decisions.labels(route.placement.policy, route.placement.route.reason).inc()
                metrics.predicted_hits.inc(route.placement.predicted_tokens)
        _count_pairs(metrics, driver)


def _count_pairs(metrics: GatewayMetrics, driver: RequestDriver) -> None:
    """Count the promised and the cached tokens of each attempt that delivered a token, by its workers.

    Attempts are numbered in the order of their placements, from 1.
    """
    placements = [route.placement for route in driver.routes if route.placement is not None]
    for number, placement in enumerate(placements, 1):
        cached = driver.cached_by_attempt.get(number)
        if cached is not None:
            pair = placement.prefill_id or LOCAL, placement.decode_id
            metrics.pair_predicted_tokens.labels(*pair).inc(placement.predicted_tokens)
            metrics.pair_cached_tokens.labels(*pair).inc(cached)


def _count_phases(metrics: GatewayMetrics, driver: RequestDriver) -> None:
    """Count the phases that the workers measured; one that never ran has no time."""
    phases = driver.phases
    metrics.prompts_computed.labels(Role.DECODE.value).inc(phases.local_prefills)
    metrics.prompts_computed.labels(Role.PREFILL.value).inc(phases.remote_prefills)
    metrics.queue_duration.observe(driver.admission_s + phases.prefill_queue + phases.grant_wait)
    for name, seconds in (
        ("queue", phases.prefill_queue),
        ("kv_alloc_wait", phases.grant_wait),
        ("encode", phases.encode),
        ("prefill", phases.prefill),
        ("kv_transfer", phases.kv_send + phases.kv_receive),
        ("decode_queue", phases.decode_queue),
        ("decode", decode_s(driver, phases)),
    ):
        if seconds > 0:
            metrics.phases[name].observe(seconds)


def _count_choices(metrics: GatewayMetrics, driver: RequestDriver, error: str | None) -> None:
    """Count the ends of the choices: those that did not finish were cancelled or failed with the request."""
    unfinished = CANCELLED if error in _BY_CLIENT else FAILED
    for choice, output in enumerate(driver.outputs):
        reason = driver.output_buffer.finished.get(choice)
        metrics.choices_ended.labels(unfinished if reason is None else reason.value).inc()
        metrics.output_length.observe(output.billed)


def create_series(metrics: GatewayMetrics) -> None:
    """Create the series whose labels are known before the first event."""
    for cause in Cause:
        if cause is not Cause.TOO_MANY_NEW:  # no attempt is counted after it
            metrics.retries.labels(cause.value)
    for role in TEXT_ROLES:
        metrics.prompts_computed.labels(role.value)
    for policy in POLICIES:
        for reason in (*REASONS, LOCAL, FALLBACK):
            metrics.route_decisions.labels(policy, reason)
    for end in (*(reason.value for reason in FinishReason), FAILED):
        metrics.choices_ended.labels(end)


def operation_of(request: pb.GenerateRequest) -> str:
    """Return the GenAI operation name."""
    return "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
