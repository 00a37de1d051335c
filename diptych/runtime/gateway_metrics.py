"""The metrics of gateways (metrics.py)."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diptych.runtime.errors import rejection_reasons
from diptych.runtime.metrics import (
    DURATION_BUCKETS,
    FIRST_TOKEN_BUCKETS,
    PER_TOKEN_BUCKETS,
    PHASE_BUCKETS,
    TOKEN_BUCKETS,
    RoleMetrics,
    TokenLatency,
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
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Request received to first token sent",
            request,
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between a request's tokens after the first",
            request,
            buckets=PER_TOKEN_BUCKETS,
            registry=registry,
        )
        self.token_latency = TokenLatency(registry)
        self.queue_duration = Histogram(
            "diptych_request_queue_duration_seconds",
            "Waiting time of a request in all queues: admission, queue, kv_alloc_wait",
            buckets=PHASE_BUCKETS,
            registry=registry,
        )
        self.prompt_length = Histogram(
            "diptych_request_input_tokens",
            "Prompt tokens of a request that was given to workers",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.output_length = Histogram(
            "diptych_request_output_tokens",
            "Tokens of a choice that has ended",
            buckets=TOKEN_BUCKETS,
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
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.http_duration = Histogram(
            "http_server_request_duration_seconds",
            "Duration of incoming HTTP requests for output, whole streams",
            ["http_route", "http_response_status_code"],
            buckets=DURATION_BUCKETS,
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
