"""Metrics of the gateway under vLLM's names, for dashboards and inference gateways that read those.

Only metrics of the same meaning are exported (docs.vllm.ai, "Production Metrics"): the whole system is one
engine; running requests are those with the workers, waiting ones those still in the gateway. As there, the
lengths of outputs, their ends and the time between tokens are of each choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych.runtime.gateway_metrics import GatewayMetrics
from gateway.attempt.types import Cause, FinishReason
from gateway.worker_pool.registry import Worker

_REASONS = {FinishReason.CANCELLED.value: "abort", FinishReason.TIME_LIMIT.value: "abort"}
"""vLLM's word for a reason of ours; the others are the same. What a client ends is an abort."""

Labels = tuple[tuple[str, str], ...]


class VllmMetrics(Collector):
    """Collector that reads the gateway's own metrics at each scrape."""

    def __init__(
        self, metrics: GatewayMetrics, model: str, decode_workers: Callable[[], Sequence[Worker]]
    ) -> None:
        """``model`` is the value of the label ``model_name``; ``decode_workers`` returns those connected."""
        self._labels = {"model_name": model, "engine": "0"}
        self._decode_workers = decode_workers
        self._ends = metrics.choices_ended
        self._sources: dict[str, MetricWrapperBase | Collector] = {
            "vllm:num_requests_running": metrics.running,
            "vllm:num_requests_waiting": metrics.waiting,
            "vllm:prompt_tokens": metrics.input_tokens,
            "vllm:generation_tokens": metrics.output_tokens,
            "vllm:prefix_cache_queries": metrics.input_tokens,
            "vllm:prefix_cache_hits": metrics.cached_input_tokens,
            "vllm:num_preemptions": metrics.retries.labels(Cause.PREEMPTED.value),
            "vllm:time_to_first_token_seconds": metrics.time_to_first_token,
            "vllm:request_time_per_output_token_seconds": metrics.time_per_output_token,
            "vllm:inter_token_latency_seconds": metrics.token_latency,
            "vllm:e2e_request_latency_seconds": metrics.request_duration,
            "vllm:request_queue_time_seconds": metrics.queue_duration,
            "vllm:request_prefill_time_seconds": metrics.phases["prefill"],
            "vllm:request_decode_time_seconds": metrics.phases["decode"],
            "vllm:request_prompt_tokens": metrics.prompt_length,
            "vllm:request_generation_tokens": metrics.output_length,
        }

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, labelled with the model only."""
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of all KV blocks in use, 0 to 1", labels=list(self._labels)
        )
        usage.add_metric(list(self._labels.values()), kv_cache_usage(self._decode_workers()))
        yield usage
        yield self._success()
        for name, source in self._sources.items():
            for family in source.collect():
                yield self._renamed(family, name)

    def describe(self) -> Iterable[Metric]:
        """Return no descriptions: otherwise a registry would collect from gauges that are not bound yet."""
        return ()

    def _success(self) -> Metric:
        """Return the ended choices by vLLM's reasons, all of which are there from the start."""
        counts = dict.fromkeys(("stop", "length", "abort", "error"), 0.0)
        for family in self._ends.collect():
            for sample in family.samples:
                reason = sample.labels["reason"]
                counts[_REASONS.get(reason, reason)] += sample.value
        success = CounterMetricFamily(
            "vllm:request_success",
            "Choices that have ended, by reason",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, value in counts.items():
            success.add_metric([*self._labels.values(), reason], value)
        return success

    def _renamed(self, family: Metric, name: str) -> Metric:
        """Return `family` under another name, its samples summed over all labels but a histogram's own."""
        sums: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        for sample in family.samples:
            bucket = tuple((label, value) for label, value in sample.labels.items() if label == "le")
            sums[sample.name.removeprefix(family.name), bucket] += sample.value
        renamed = Metric(name, family.documentation, family.type)
        for (suffix, bucket), value in sums.items():
            renamed.add_sample(name + suffix, {**self._labels, **dict(bucket)}, value)
        return renamed


def kv_cache_usage(workers: Sequence[Worker]) -> float:
    """Return the fraction of the decode workers' blocks in use, as last reported; 0 without workers."""
    total = sum(worker.load.total_blocks for worker in workers)
    free = sum(worker.load.free_blocks for worker in workers)
    return (total - free) / total if total else 0.0
