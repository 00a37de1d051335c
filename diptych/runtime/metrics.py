"""Rules and parts of the metrics, each defined once: one class per role, one collector per attribute.

Those of gateways are in gateway_metrics.py, those of workers in worker_metrics.py.

Names follow the OpenTelemetry semantic conventions (GenAI and RPC) with dots as underscores and the unit at
the end, as the Prometheus exporters of OpenTelemetry write them; what has no convention is `diptych_…`. All
times in seconds. Labels have few values by construction: never the id of a request, never text. Some
collectors of the gateway's only pass on what others count: `gateway.worker_pool.load_metrics`, by worker,
`gateway.metrics.models`, by model, and `gateway.metrics.vllm`.

Values are recorded at the end of a request or of an engine step; only `TokenLatency` is recorded with the
tokens. Gauges of state that exists anyway are best bound with `set_function` and then cost something only
when scraped. A series whose labels are known beforehand exists from the start, with the value 0: the first
event is then an increase that `rate` sees.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

PROVIDER = "diptych"
"""Value of `gen_ai.provider.name`, which the GenAI conventions require."""

# A `_created` series beside every counter and histogram doubles the page without a reader.
disable_created_metrics()  # type: ignore[no-untyped-call]

# The buckets that the GenAI semantic conventions advise, with finer ones below for small models.
DURATION_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28),
    *(2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84),
)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
# Powers of four of tokens, as the GenAI conventions advise for token usage.
TOKEN_BUCKETS = tuple(4**power for power in range(14))
PHASE_BUCKETS = (
    *(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


def new_registry() -> CollectorRegistry:
    """Return an empty registry with the process's own CPU, memory and file-descriptor metrics."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class TokenLatency(Collector):
    """Histogram `diptych_inter_token_latency_seconds`, recorded by one thread while tokens flow.

    A bisection and two additions: a fifth of the cost of `Histogram.observe`, which takes locks and walks
    over the buckets.
    """

    name = "diptych_inter_token_latency_seconds"
    documentation = (
        "Time between two tokens of a choice; that of tokens that came together is divided by them"
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts = [0] * (len(PER_TOKEN_BUCKETS) + 1)  # the last one is of longer times
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float, tokens: int) -> None:
        """Record `tokens` that came together, `seconds` after the choice's token before them."""
        self._counts[bisect_left(PER_TOKEN_BUCKETS, seconds / tokens)] += tokens
        self._sum += seconds

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Return the family without samples, for its name."""
        return (HistogramMetricFamily(self.name, self.documentation),)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the one family."""
        family = HistogramMetricFamily(self.name, self.documentation)
        bounds = [*(str(bound) for bound in PER_TOKEN_BUCKETS), "+Inf"]
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class RoleMetrics:
    """Metrics of every role. Load and phases carry the role ("gateway", "prefill", "decode") as a label.

    `phases` are the values of the label `phase`, in the order in which a request passes them.
    """

    def __init__(self, registry: CollectorRegistry, role: str, phases: tuple[str, ...]) -> None:
        duration = Histogram(
            "diptych_request_phase_duration_seconds",
            "Time of requests in a phase (queue, kv_alloc_wait, prefill, kv_transfer, decode, …)",
            ["role", "phase"],
            buckets=PHASE_BUCKETS,
            registry=registry,
        )
        self.phases = {phase: duration.labels(role, phase) for phase in phases}
        self.running = Gauge(
            "diptych_requests_running", "Requests being worked on", ["role"], registry=registry
        ).labels(role)
        self.waiting = Gauge(
            "diptych_requests_waiting", "Requests that wait for their turn", ["role"], registry=registry
        ).labels(role)
        self.directory_connected = Gauge(
            "diptych_directory_connected", "1 while the Redis directory answers", registry=registry
        )
