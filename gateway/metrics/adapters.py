"""Metrics of adapters: gauges by adapter, and what vLLM tells inference gateways of them.

Nothing is counted while requests run: both read at each scrape what lives anyway. The histograms and counters
with the label `gen_ai_request_model` have the adapter's name there, as it is the model that the caller asked
for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.adapters.registry import AdapterRegistry
from gateway.session.request_driver import RequestDriver
from gateway.session.states import State
from gateway.worker_pool.registry import Worker

Drivers = Callable[[], Sequence[RequestDriver]]
_WAITING = frozenset({State.QUEUED, State.ROUTING})


def requests_by_adapter(drivers: Iterable[RequestDriver]) -> tuple[Counter[str], Counter[str]]:
    """Return the running and the waiting requests of each adapter, by name."""
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for driver in drivers:
        if (adapter := driver.job.request.adapter) is not None:
            (waiting if driver.state.phase in _WAITING else running)[adapter.name] += 1
    return running, waiting


class AdapterMetrics(Collector):
    """Collector of the gateway's adapters. One that was unloaded is gone from the page."""

    def __init__(self, models: Callable[[], Iterable[tuple[str, AdapterRegistry]]], drivers: Drivers) -> None:
        """Create a collector of the adapters of ``models``, (name, adapters) each."""
        self._models = models
        self._drivers = drivers

    def collect(self) -> Iterator[Metric]:
        """Yield all families; without adapters only their numbers have values, 0."""
        models = {name: list(adapters) for name, adapters in self._models()}
        count = GaugeMetricFamily("diptych_adapters", "LoRA adapters that are served", labels=("model",))
        for model, adapters in models.items():
            count.add_metric((model,), len(adapters))
        yield count
        running, waiting = requests_by_adapter(self._drivers())
        for name, meaning, values in (
            ("running", "Requests of a LoRA adapter that workers have", running),
            ("waiting", "Requests of a LoRA adapter that wait in the gateway", waiting),
        ):
            family = GaugeMetricFamily(f"diptych_adapter_requests_{name}", meaning, labels=("adapter",))
            for adapter in (one for adapters in models.values() for one in adapters):
                family.add_metric((adapter.name,), values[adapter.name])
            yield family

    def describe(self) -> Iterable[Metric]:
        """Return the families, by which a registry refuses a second collector of the same names."""
        return self.collect()


class VllmLoraMetrics(Collector):
    """Collector of `vllm:lora_requests_info`, as inference gateways read it to route by adapter.

    A series whose labels list the adapters with running and with waiting requests, and how many a step can
    compute at once; the value is the time of the scrape, in seconds since 1970.
    """

    def __init__(self, drivers: Drivers, workers: Callable[[], Sequence[Worker]]) -> None:
        self._drivers = drivers
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """Yield the one family."""
        running, waiting = requests_by_adapter(self._drivers())
        at_once = min((worker.load.max_loras for worker in self._workers()), default=0)
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Running and waiting LoRA requests",
            labels=("running_lora_adapters", "waiting_lora_adapters", "max_lora"),
        )
        family.add_metric((",".join(sorted(running)), ",".join(sorted(waiting)), str(at_once)), time.time())
        yield family

    def describe(self) -> Iterable[Metric]:
        """Return no descriptions, as of all metrics under others' names."""
        return ()
