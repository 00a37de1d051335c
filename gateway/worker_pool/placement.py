"""Placement of attempts: the pair of workers, by load and cached prefix, and what an attempt waits for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from gateway.adapters.adapter import Adapter
from gateway.attempt.types import LocalPrefill, Role
from gateway.attempt.work import Job
from gateway.worker_pool.adapter_loads import AdapterLoads
from gateway.worker_pool.drafter_pairs import PromptHits, kept_by_pair, pair_candidates
from gateway.worker_pool.ejection import Ejections
from gateway.worker_pool.encoders import EncoderCandidate, choose_encoder, reads_images
from gateway.worker_pool.local_prefill import LocalMode, choose_local
from gateway.worker_pool.pair_savings import most_saved_tokens
from gateway.worker_pool.prefix_held import NOTHING, Held
from gateway.worker_pool.prefix_index import PrefixIndexReader
from gateway.worker_pool.registry import Worker, WorkerRegistry
from gateway.worker_pool.router import (
    BY_COST,
    WITHOUT_INDEX,
    NoAdapter,
    NoProof,
    NoWorker,
    Placement,
    Route,
    RouteRequest,
    choose_route,
)
from gateway.worker_pool.step_rates import prefill_token_s

PROOF_MARGIN_S = 0.02  # what is read so soon after the loss of a worker may have been sent before it


class AttemptPlacer:
    """Chooses workers for attempts among those that the registry knows; sends nothing."""

    def __init__(
        self,
        registry: WorkerRegistry,
        adapter_loads: AdapterLoads,
        ejections: Ejections,
        prefixes: PrefixIndexReader,
        *,
        has_index: Callable[[], bool],
        local_prefill: LocalMode,
        clock: Callable[[], float],
    ) -> None:
        """Create a placer.

        Args:
            has_index: returns whether the index of prefixes is up to date.
            clock: the time that ejections end by.
        """
        self._registry = registry
        self._adapter_loads = adapter_loads
        self._ejections = ejections
        self._prefixes = prefixes
        self._has_index = has_index
        self._local_prefill = local_prefill
        self._clock = clock
        self._lost_at = -math.inf

    def on_loss(self, now: float) -> None:
        """Record the loss of a worker that had not announced it, at `now` on the event loop's clock."""
        self._lost_at = now

    def tokens_to_compute(self, job: Job) -> int:
        """Predict the prompt tokens to compute: those that the best pair of workers does not save."""
        prompt = job.request.prompt_ids
        prefill, decode = self._registry.serving(Role.PREFILL), self._registry.serving(Role.DECODE)
        hits = PromptHits(self._prefixes, [*prefill, *decode], job, prompt)
        saved = most_saved_tokens(len(prompt), *pair_candidates(prefill, decode, hits))
        return max(len(prompt) - saved, 1)

    def falls_back(self, job: Job) -> bool:
        """Return whether no prefill worker is linked and a decode worker would compute this prompt."""
        most = self._registry.fallback_tokens
        if not most:
            return False
        decode, prompt = self._registry.serving(Role.DECODE), job.request.prompt_ids
        hits = self._prefixes.hits(decode, job, prompt)
        held = ((sum(hits.get(w.record.worker_id, NOTHING)), w.record.block_size) for w in decode)
        cached = max((blocks * size for blocks, size in held), default=0)
        images = job.request.images
        return max(len(prompt) - cached, 1) <= most and (images is None or cached >= images.end)

    def place_attempt(
        self, request: RouteRequest, job: Job, token_ids: tuple[int, ...]
    ) -> Placement | NoWorker | NoProof | NoAdapter:
        """Choose the pair of workers for an attempt, by load and cached prefix.

        After a worker was lost, the others may be dead as well (a host that fails takes all of its workers),
        and their links break some time later: those that sent something since come first. An attempt of a
        request that has lost one already waits for such a pair; heartbeats come four times a second. It also
        waits for word of its suspects: any may be one death too many.

        Only workers that have its adapter get an attempt; it waits while one is to have it soon.
        """
        if any(self._is_silent(worker_id, at) for worker_id, at in request.suspects):
            return NoProof()
        prefill, decode = self._registry.serving(Role.PREFILL), self._registry.serving(Role.DECODE)
        if (adapter := job.request.adapter) is not None:
            prefill = self._adapter_loads.holders(prefill, adapter.digest)
            decode = self._adapter_loads.holders(decode, adapter.digest)
        encoders: list[EncoderCandidate] = []
        all_prefill = prefill
        if request.images_end:
            encoders = self._encoders(request)
            prefill = [w for w in prefill if reads_images(w.record, encoders)]
            if all_prefill and not prefill and self._awaits_encoders(request):
                return NoProof()
        hits = PromptHits(self._prefixes, [*prefill, *decode], job, token_ids)
        proven = self._proven(prefill), self._proven(decode)
        route = self._choose_pair(request, *proven, hits)
        if isinstance(route, NoWorker) and proven != (prefill, decode):
            route = self._choose_pair(request, prefill, decode, hits)
            if request.after_loss and not isinstance(route, NoWorker):
                return NoProof()
        if isinstance(route, NoWorker):
            if all_prefill and not prefill:
                return NoWorker(Role.ENCODE)
            return route if adapter is None else self._without_adapter(route, adapter)
        worker = self._registry.require(route.decode_id)
        target = worker.record
        source = None if route.prefill_id is None else self._registry.require(route.prefill_id).record
        if route.local is not LocalPrefill.NO:
            worker.unreported_local += request.tokens - route.matched_blocks * target.block_size
        return Placement(
            route,
            BY_COST if self._has_index() else WITHOUT_INDEX,
            self._prefixes.namespace(job, kept_by_pair(source, target)),
            predicted_tokens=route.matched_blocks * target.block_size,
            encode_id=self._encoder_of(route, job, encoders),
        )

    def _encoders(self, request: RouteRequest) -> list[EncoderCandidate]:
        """Return the encode workers that may get an attempt: those first that live for sure, and after a loss
        no others.
        """
        workers = self._registry.serving(Role.ENCODE)
        proven = self._proven(workers, request.suspected_at)
        workers = proven if request.after_loss else proven or workers
        return [w.encoder_candidate() for w in workers if w.record.worker_id not in request.avoid]

    def _awaits_encoders(self, request: RouteRequest) -> bool:
        """Return whether encode workers are linked, and none was heard of since a loss."""
        workers = self._registry.serving(Role.ENCODE)
        return request.after_loss and bool(workers) and not self._proven(workers, request.suspected_at)

    def _encoder_of(self, route: Route, job: Job, candidates: Sequence[EncoderCandidate]) -> str | None:
        """Return the encode worker for an attempt; None without need, or where prefill encodes."""
        images = job.request.images
        if images is None or route.prefill_id is None:
            return None
        record = self._registry.require(route.prefill_id).record
        return choose_encoder(images.images[0].digest, images.rows, record, candidates)

    def _without_adapter(self, route: NoWorker, adapter: Adapter) -> NoWorker | NoProof | NoAdapter:
        """Return what an attempt without a pair has to wait for: its adapter, or a worker."""
        loads, digest = self._adapter_loads, adapter.digest
        serving = self._registry.serving(route.role)
        if loads.may_come(serving, digest):
            return NoProof()
        return route if not serving or loads.holders(serving, digest) else NoAdapter()

    def _choose_pair(
        self,
        request: RouteRequest,
        prefill: Sequence[Worker],
        decode: Sequence[Worker],
        hits: PromptHits,
    ) -> Route | NoWorker:
        route = self._choose(request, self._not_ejected(prefill), self._not_ejected(decode), hits)
        if isinstance(route, NoWorker):  # a slow worker is better than none
            route = self._choose(request, prefill, decode, hits)
        return route

    def _choose(
        self,
        request: RouteRequest,
        prefill: Sequence[Worker],
        decode: Sequence[Worker],
        hits: PromptHits,
    ) -> Route | NoWorker:
        usable = [w for w in prefill if w.record.worker_id not in request.avoid]
        route = choose_route(request, *pair_candidates(usable, decode, hits))
        return self._choose_local(request, route, decode, hits.whole) or route

    def _choose_local(
        self,
        request: RouteRequest,
        remote: Route | NoWorker,
        decode: Sequence[Worker],
        hits: Mapping[str, Held],
    ) -> Route | None:
        """Return the route of a decode worker that computes the prompt itself, if that is the better one."""
        prefill = self._registry.serving(Role.PREFILL)
        token_s = prefill_token_s(w.rates for w in prefill or decode)
        return choose_local(
            request,
            remote,
            (w.local_candidate(hits.get(w.record.worker_id, NOTHING), token_s) for w in decode),
            self._local_prefill,
            token_s=token_s,
            fall_back=all(w.record.worker_id in request.avoid for w in prefill),
        )

    def _proven(self, workers: list[Worker], since: float = -math.inf) -> list[Worker]:
        """Return the workers that were heard of after the last loss of another one, and after `since`."""
        at = max(self._lost_at, since) + PROOF_MARGIN_S
        return [w for w in workers if (w.link.last_seen or 0.0) >= at]

    def _is_silent(self, worker_id: str, since: float) -> bool:
        """Return whether the worker counts as linked, but nothing came from it since that time."""
        worker = self._registry.get(worker_id)
        seen = worker.link.last_seen if worker is not None and worker.link.up else math.inf
        return (seen or 0.0) < since + PROOF_MARGIN_S

    def _not_ejected(self, workers: Sequence[Worker]) -> list[Worker]:
        now = self._clock()
        return [w for w in workers if not self._ejections.is_ejected(w.record.worker_id, now)]
