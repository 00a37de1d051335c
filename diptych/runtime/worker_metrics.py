"""The metrics of prefill, decode and encode workers (metrics.py)."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diptych.runtime.metrics import PHASE_BUCKETS, RoleMetrics


class StepMetrics(RoleMetrics):
    """Metrics of all workers: the engine's steps."""

    def __init__(self, registry: CollectorRegistry, role: str, phases: tuple[str, ...]) -> None:
        super().__init__(registry, role, phases)
        self.step_duration = Histogram(
            "diptych_engine_step_duration_seconds",
            "Duration of one forward pass; of an encode worker: over one tile",
            ["role"],
            buckets=PHASE_BUCKETS,
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
            buckets=PHASE_BUCKETS,
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
            buckets=PHASE_BUCKETS,
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
