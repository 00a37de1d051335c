"""Every metric of the system, defined once: one class per role, one collector per attribute.

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
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from diptych.runtime.errors import rejection_reasons

PROVIDER = "diptych"
"""Value of `gen_ai.provider.name`, which the GenAI conventions require."""

# A `_created` series beside every counter and histogram doubles the page without a reader.
disable_created_metrics()  # type: ignore[no-untyped-call]

# The buckets that the GenAI semantic conventions advise, with finer ones below for small models.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Powers of four of tokens, as the GenAI conventions advise for token usage.
_TOKENS = tuple(4**power for power in range(14))
_PHASE = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


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
        self._counts = [0] * (len(_PER_TOKEN) + 1)  # the last one is of longer times
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float, tokens: int) -> None:
        """Record `tokens` that came together, `seconds` after the choice's token before them."""
        self._counts[bisect_left(_PER_TOKEN, seconds / tokens)] += tokens
        self._sum += seconds

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Return the family without samples, for its name."""
        return (HistogramMetricFamily(self.name, self.documentation),)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the one family."""
        family = HistogramMetricFamily(self.name, self.documentation)
        bounds = [*(str(bound) for bound in _PER_TOKEN), "+Inf"]
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
            buckets=_PHASE,
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


class GatewayMetrics(RoleMetrics):
    """The gateway's: latency as clients see it, routing, refusals."""

    def __init__(self, registry: CollectorRegistry) -> None:
        phases = (
            *("admission", "queue", "kv_alloc_wait", "encode", "prefill", "kv_transfer"),
            *("decode_queue", "decode"),
        )
        super().__init__(registry, "gateway", phases)
        request = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]
        self.request_duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Request received to last token sent; error_type is empty for requests that succeeded",
            [*request, "error_type"],
            buckets=_DURATION,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Request received to first token sent",
            request,
            buckets=_FIRST_TOKEN,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between a request's tokens after the first",
            request,
            buckets=_PER_TOKEN,
            registry=registry,
        )
        self.token_latency = TokenLatency(registry)
        self.queue_duration = Histogram(
            "diptych_request_queue_duration_seconds",
            "Waiting time of a request in all queues: admission, queue, kv_alloc_wait",
            buckets=_PHASE,
            registry=registry,
        )
        self.prompt_length = Histogram(
            "diptych_request_input_tokens",
            "Prompt tokens of a request that was given to workers",
            buckets=_TOKENS,
            registry=registry,
        )
        self.output_length = Histogram(
            "diptych_request_output_tokens",
            "Tokens of a choice that has ended",
            buckets=_TOKENS,
            registry=registry,
        )
        self.choices_ended = Counter(
            "diptych_choices_ended",
            "Choices of requests that were queued, by end",
            ["reason"],
            registry=registry,
        )
        self.call_duration = Histogram(
            "rpc_server_call_duration_seconds",
            "Duration of incoming gRPC calls",
            ["rpc_method", "rpc_response_status_code"],
            buckets=_DURATION,
            registry=registry,
        )
        self.http_duration = Histogram(
            "http_server_request_duration_seconds",
            "Duration of incoming HTTP requests for output, whole streams",
            ["http_route", "http_response_status_code"],
            buckets=_DURATION,
            registry=registry,
        )
        self.input_tokens = Counter(
            "diptych_input_tokens", "Prompt tokens of requests that were given to workers", registry=registry
        )
        self.cached_input_tokens = Counter(
            "diptych_cached_input_tokens", "Of these, found in a prefix cache", registry=registry
        )
        self.output_tokens = Counter("diptych_output_tokens", "Tokens sent to clients", registry=registry)
        self.route_decisions = Counter(
            "diptych_route_decisions", "Routing decisions", ["policy", "reason"], registry=registry
        )
        self.prompts_computed = Counter(
            "diptych_prompts_computed",
            "Prompts of attempts that brought output, by the worker that computed them",
            ["by"],
            registry=registry,
        )
        self.predicted_hits = Counter(
            "diptych_route_predicted_hits",
            "Prompt tokens that the prefix index promised to be cached (actual: diptych_prefix_cache_hits)",
            registry=registry,
        )
        pair = ["prefill_worker", "decode_worker"]
        self.pair_predicted_tokens = Counter(
            "diptych_route_pair_predicted_tokens",
            "Prompt tokens that the router expected a pair not to compute, of attempts with output",
            pair,
            registry=registry,
        )
        self.pair_cached_tokens = Counter(
            "diptych_route_pair_cached_tokens",
            "Prompt tokens of the same attempts that the pair did not compute",
            pair,
            registry=registry,
        )
        self.rejections = Counter(
            "diptych_rejections", "Requests refused, by error reason", ["reason"], registry=registry
        )
        self.fallback_answers = Counter(
            "diptych_fallback_answers",
            "Refused requests that were passed on to --fallback-url, by HTTP status; 0: it gave no answer",
            ["status"],
            registry=registry,
        )
        self.image_fetches = Counter(
            "diptych_image_fetches",
            "URLs of images by outcome: fetched, or refused for any reason",
            ["outcome"],
            registry=registry,
        )
        self.fair_share_turns = Counter(
            "diptych_fair_share_turns",
            "Exchanges of what tenants get at each gateway, by outcome: answered, or lost without an answer",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("answered", "lost"):
            self.fair_share_turns.labels(outcome)
        self.fair_share_tokens = Counter(
            "diptych_fair_share_charged_tokens",
            "Prompt tokens served at other gateways that tenants were charged here",
            registry=registry,
        )
        self.slow_readers = Counter(
            "diptych_slow_readers",
            "Streams ended because the client did not read them, by the limit that was exceeded",
            ["limit"],
            registry=registry,
        )
        self.unread_output = Gauge(
            "diptych_unread_output_bytes", "Output that waits for slow readers", registry=registry
        )
        for reason in rejection_reasons():
            self.rejections.labels(reason)
        self.retries = Counter(
            "diptych_retries", "Attempts after a request's first, by cause", ["cause"], registry=registry
        )

    def forget_model(self, name: str) -> None:
        """Remove the series of a model that is not served any more: adapters come and go."""
        for metric in (self.request_duration, self.time_to_first_token, self.time_per_output_token):
            metric.remove_by_labels({"gen_ai_request_model": name})


class StepMetrics(RoleMetrics):
    """Metrics of all workers: the engine's steps."""

    def __init__(self, registry: CollectorRegistry, role: str, phases: tuple[str, ...]) -> None:
        super().__init__(registry, role, phases)
        self.step_duration = Histogram(
            "diptych_engine_step_duration_seconds",
            "Duration of one forward pass; of an encode worker: over one tile",
            ["role"],
            buckets=_PHASE,
            registry=registry,
        ).labels(role)
        self.step_tokens = Counter(
            "diptych_engine_step_tokens",
            "Tokens computed by engine steps; of an encode worker: rows of images",
            ["role"],
            registry=registry,
        ).labels(role)


class WorkerMetrics(StepMetrics):
    """Metrics of the two workers that exchange blocks: the handoff."""

    def __init__(self, registry: CollectorRegistry, role: str, phases: tuple[str, ...]) -> None:
        super().__init__(registry, role, phases)
        self.kv_transfer_duration = Histogram(
            "diptych_kv_transfer_duration_seconds",
            "Prefill: last chunk computed to commit sent. Decode: commit received to verified",
            ["transport"],
            buckets=_PHASE,
            registry=registry,
        )
        self.kv_transfer_bytes = Counter(
            "diptych_kv_transfer_bytes",
            "KV bytes moved (none when prefill computes in place)",
            ["transport"],
            registry=registry,
        )
        self.kv_transfer_failures = Counter(
            "diptych_kv_transfer_failures",
            "Handoffs that failed: the other worker was lost or refused, or what came was damaged",
            ["transport"],
            registry=registry,
        )
        self._gpu_memory = Gauge(
            "diptych_gpu_memory_bytes",
            "Bytes of the GPU's memory by use, as at the start: taken, or set aside",
            ["use"],
            registry=registry,
        )
        self._read_bytes = Counter(
            "diptych_engine_step_bytes",
            "Bytes that steps on a GPU have to read: weights, keys and values; none on a CPU",
            ["role"],
            registry=registry,
        ).labels(role)
        self._operations = Counter(
            "diptych_engine_step_operations",
            "Additions and multiplications of steps on a GPU; none on a CPU",
            ["role"],
            registry=registry,
        ).labels(role)
        self.tier_bytes = Gauge(
            "diptych_kv_tier_bytes", "Bytes of the blocks in a tier", ["tier"], registry=registry
        )
        self.tier_blocks_loaded = Counter(
            "diptych_kv_tier_blocks_loaded", "Blocks that came back from a tier", ["tier"], registry=registry
        )
        self.tier_entries_damaged = Gauge(
            "diptych_kv_tier_entries_damaged",
            "Entries of tiers that were not what had been stored, and were removed",
            registry=registry,
        )

    def set_gpu_memory(self, uses: Mapping[str, int]) -> None:
        """Set the bytes of the GPU's memory by use."""
        for use, size in uses.items():
            self._gpu_memory.labels(use.replace(" ", "_").lower()).set(size)

    def count_work(self, read_bytes: int, operations: int) -> None:
        """Count a step's bytes and operations."""
        self._read_bytes.inc(read_bytes)
        self._operations.inc(operations)

    def create_transport_series(self, transports: Iterable[str]) -> None:
        """Create the series of `transports`, which this worker may use, and of failures without one."""
        for transport in transports:
            self.kv_transfer_duration.labels(transport)
            self.kv_transfer_bytes.labels(transport)
            self.kv_transfer_failures.labels(transport)
        self.kv_transfer_failures.labels("none")


class PrefillMetrics(WorkerMetrics):
    """The prefill worker's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "prefill", ("queue", "kv_alloc_wait", "kv_pull", "encode", "prefill"))
        self.pulls = Counter(
            "diptych_kv_pulls",
            "Pulls of cached blocks from decode workers: pulled, partly, late, broken, or declined as dearer",
            ["outcome"],
            registry=registry,
        )
        self.pulled_tokens = Counter(
            "diptych_kv_pulled_tokens", "Prompt tokens whose KV was pulled", registry=registry
        )
        self.pull_duration = Histogram(
            "diptych_kv_pull_duration_seconds",
            "Time of pulls, whatever came of them",
            buckets=_PHASE,
            registry=registry,
        )
        self.images = _images(registry)
        self.embedding_fetches = Counter(
            "diptych_embedding_fetches",
            "Images whose rows were asked for at an encode worker: fetched or lost; parts: damaged or stale",
            ["outcome"],
            registry=registry,
        )
        self.embedding_bytes = Counter(
            "diptych_embedding_bytes",
            "Bytes of images' rows from encode workers, by shared_memory, tcp or the workers' stream",
            ["transport"],
            registry=registry,
        )
        self.pull_cost = Gauge(
            "diptych_kv_pull_cost",
            "Cost of pulling a token, in tokens that are computed in the same time",
            registry=registry,
        )


class EncodeMetrics(StepMetrics):
    """The encode worker's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "encode", ("queue", "encode"))
        self.images = _images(registry)
        self.cached_bytes = Gauge(
            "diptych_embedding_cache_bytes", "Memory of the embeddings that are kept", registry=registry
        )


def _images(registry: CollectorRegistry) -> Counter:
    return Counter(
        "diptych_images",
        "Images of prompts: encoded here, cached with their embeddings, or fetched from an encode worker",
        ["outcome"],
        registry=registry,
    )


class DecodeMetrics(WorkerMetrics):
    """The decode worker's: it owns the KV blocks and the prefix cache."""

    def __init__(self, registry: CollectorRegistry) -> None:
        phases = ("queue", "kv_alloc_wait", "prefill", "decode_queue", "decode")
        super().__init__(registry, "decode", phases)
        self.local_prefills = Counter(
            "diptych_local_prefills", "Prompts that the decode worker computed itself", registry=registry
        )
        self.local_prefill_tokens = Counter(
            "diptych_local_prefill_tokens", "Tokens of these that were not cached", registry=registry
        )
        self.local_prefills_refused = Counter(
            "diptych_local_prefills_refused",
            "Prompts sent for that, of which more tokens were new than --max-local-prefill-tokens",
            registry=registry,
        )
        self.kv_cache_utilization = Gauge(
            "diptych_kv_cache_utilization", "Share of KV blocks that requests hold, 0 to 1", registry=registry
        )
        self.quarantined_blocks = Gauge(
            "diptych_kv_cache_quarantined_blocks",
            "Blocks of aborted grants whose writer has not yet promised to stop",
            registry=registry,
        )
        self.quarantine_age = Gauge(
            "diptych_kv_cache_quarantine_age_seconds",
            "Age of the oldest one",
            registry=registry,
        )
        self.draft_tokens = Counter(
            "diptych_spec_decode_draft_tokens", "Tokens drafted by speculative decoding", registry=registry
        )
        self.accepted_tokens = Counter(
            "diptych_spec_decode_accepted_tokens", "Of these, those that were right", registry=registry
        )
        self.prefix_cache_queries = Counter(
            "diptych_prefix_cache_queries", "Prompt tokens looked up in the prefix cache", registry=registry
        )
        self.prefix_cache_hits = Counter(
            "diptych_prefix_cache_hits", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.preemptions = Counter(
            "diptych_preemptions", "Requests sent back because blocks ran out", registry=registry
        )
