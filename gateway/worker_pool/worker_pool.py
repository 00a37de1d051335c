"""The pool of this gateway's workers: found in the directory, linked, counted, and offered to the router.

The directory, and a supervisor for its own, says which workers exist; the links say which of them answer. A
worker whose lease ran out stays as long as its link is up, and is chosen only when there is no leased one: an
unreachable, flushed or slow Redis takes no worker from the gateway, and a worker that drains (it announces
it, and gives up its lease) gets no new work. Nor does one that is suspected of hanging, or that is ejected
for slowness, while there are others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diptych.runtime.discovery.records import WorkerRecord
from diptych.runtime.internal_tls import InternalTls
from diptych.worker.v1 import decode_pb2, encode_pb2, prefill_pb2, work_pb2
from gateway.adapters.adapter import Adapter
from gateway.attempt.types import AttemptFailed, Cause, EncoderRoute, LocalPrefill, Role
from gateway.attempt.work import Job
from gateway.model.images import PromptImages
from gateway.worker_pool.adapter_loads import AdapterLoads
from gateway.worker_pool.arrival_wait import ArrivalWait
from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate
from gateway.worker_pool.codec import (
    AdapterAnswer,
    DecodeCodec,
    EncodeCodec,
    Flushed,
    Load,
    PrefillCodec,
    WorkerCodec,
    WorkerEvent,
)
from gateway.worker_pool.ejection import Ejections
from gateway.worker_pool.encoders import EncoderCandidate, choose_encoder, reads_images
from gateway.worker_pool.image_messages import image_parts
from gateway.worker_pool.links import Link, LinkTiming, PendingFlushes
from gateway.worker_pool.local_prefill import LocalMode, choose_local
from gateway.worker_pool.pair_savings import most_saved_tokens
from gateway.worker_pool.prefix_held import NOTHING, Held
from gateway.worker_pool.prefix_index import PrefixIndex, PrefixIndexReader
from gateway.worker_pool.registry import Worker, WorkerRegistry, new_worker
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

RECONCILE_S = 0.25
PROOF_MARGIN_S = 0.02  # what is read so soon after the loss of a worker may have been sent before it
_log = logging.getLogger(__name__)


class Directory(PrefixIndex, Protocol):
    """The local mirror of the Redis directory; its lookups do no I/O."""

    @property
    def connected(self) -> bool: ...
    def workers(self) -> list[WorkerRecord]: ...


class WorkerPoolListener(Protocol):
    """The receiver of the workers' events.

    ``graceful``: a lost worker had announced its shutdown. ``same_process``: the process that was lost is
    linked again; otherwise another one is in its place.
    """

    def on_events(self, events: Sequence[WorkerEvent]) -> None: ...
    def on_worker_down(self, worker_id: str, graceful: bool) -> None: ...
    def on_worker_up(self, worker_id: str, same_process: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class GatewayIdentity:
    """The identity of this gateway to the workers, and the model and secret that its workers share."""

    gateway_id: str
    incarnation: int
    model_digest: str
    secret: bytes = field(repr=False)


class WorkerPool:
    """Implements `gateway.session.request_driver.Workers` and `gateway.worker_pool.links.LinkListener`."""

    def __init__(
        self,
        directory: Directory,
        listener: WorkerPoolListener,
        identity: GatewayIdentity,
        *,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
        timing: LinkTiming | None = None,
        arrival_wait_s: float = 0.0,
        local_workers: Callable[[], list[WorkerRecord]] = list,
        local_prefill: LocalMode = LocalMode.AUTO,
        needed_adapters: Callable[[], dict[bytes, Adapter]] = dict,
        tls: InternalTls | None = None,
        is_served: Callable[[str], bool] = lambda digest: False,
        strangers: set[tuple[str, int]] | None = None,
    ) -> None:
        """Create a pool.

        Args:
            local_workers: returns those that the gateway's own supervisor knows to serve.
            needed_adapters: returns the adapters that all workers must have, by digest.
            tls: certificates for the links; None: they are plain.
            is_served: returns whether this gateway serves the model of a digest with another pool.
            strangers: workers of other models that the log has named, (id, incarnation) each, of all pools.
        """
        self._tls = tls
        self._is_served = is_served
        self._local_prefill = local_prefill
        self._directory = directory
        self._local_workers = local_workers
        self._listener = listener
        self._identity = identity
        self._tell_change = on_change
        self._timing = timing
        self._clock = clock
        self._codecs: dict[str, WorkerCodec] = {
            "prefill": PrefillCodec(identity.gateway_id, identity.incarnation),
            "decode": DecodeCodec(identity.gateway_id, identity.incarnation),
            "encode": EncodeCodec(identity.gateway_id, identity.incarnation),
        }
        self.registry = WorkerRegistry(falls_back=local_prefill is not LocalMode.NEVER)
        self.adapter_loads = AdapterLoads(self.registry, needed_adapters, clock)
        self._last_incarnation: dict[str, int] = {}  # of the process that was linked last, by worker id
        self._logged = set() if strangers is None else strangers  # workers of other models, logged once
        self._lost_at = -math.inf  # the last worker, but for those that had announced it; event loop's clock
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.pending_flushes = PendingFlushes()
        self.ejections = Ejections()
        self.arrivals = ArrivalWait(lambda: self.registry.missing_role() is None, arrival_wait_s, clock)
        self._prefixes = PrefixIndexReader(directory, identity.secret, identity.model_digest)

    # --- lifecycle ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow(), name="worker pool")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for worker in self.registry:
            self._remove(worker)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _follow(self) -> None:
        while True:
            try:
                self.reconcile()
            except Exception:  # one bad record must not end the loop over all others
                _log.exception("the directory could not be read")
            await asyncio.sleep(RECONCILE_S)

    def reconcile(self) -> None:
        """Make the links match the directory's records."""
        known = [*self._local_workers(), *self._directory.workers()]
        records = {r.worker_id: r for r in known if self._is_ours(r)}
        for worker in self.registry:
            record = records.get(worker.record.worker_id)
            worker.leased = record is not None
            replaced = record is not None and _identity(record) != _identity(worker.record)
            if replaced or (record is None and not worker.link.up):
                self._remove(worker)
        for worker_id, record in records.items():
            if worker_id not in self.registry:
                self._add(record)
        self.adapter_loads.reconcile()

    def _is_ours(self, record: WorkerRecord) -> bool:
        if record.model_digest == self._identity.model_digest and record.role in self._codecs:
            return True
        key = (record.worker_id, record.incarnation)
        if key not in self._logged and not self._is_served(record.model_digest):
            self._logged.add(key)
            _log.warning("worker %s serves another model than this gateway: not linked", record.worker_id)
        return False

    def _add(self, record: WorkerRecord) -> None:
        link = Link(
            self._codecs[record.role],
            self,
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            address=record.address,
            timing=self._timing,
            tls=self._tls,
        )
        self.registry.add(new_worker(record, link))
        link.start()

    def _remove(self, worker: Worker) -> None:
        worker.link.stop()  # which reports a loss, of the worker that the registry still has
        self.registry.remove(worker.record.worker_id)
        self.ejections.forget(worker.record.worker_id)
        task = asyncio.create_task(worker.link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _on_change(self) -> None:
        self.arrivals.update()
        self._tell_change()

    # --- queries --------------------------------------------------------------------------------------

    def other_models(self) -> list[WorkerRecord]:
        """Return the workers of the directory that serve none of this gateway's models."""
        others = (record for record in self._directory.workers() if not self._is_ours(record))
        return [record for record in others if not self._is_served(record.model_digest)]

    def tokens_to_compute(self, job: Job) -> int:
        """Predict the prompt tokens to compute: those that the best pair of workers does not save."""
        prompt = job.request.prompt_ids
        prefill, decode = self.registry.serving(Role.PREFILL), self.registry.serving(Role.DECODE)
        hits = self._prefixes.hits([*prefill, *decode], job, prompt)
        saved = most_saved_tokens(len(prompt), *_candidates(prefill, decode, hits)) if hits else 0
        return max(len(prompt) - saved, 1)

    def falls_back(self, job: Job) -> bool:
        """Return whether no prefill worker is linked and a decode worker would compute this prompt."""
        most = self.registry.fallback_tokens
        if not most:
            return False
        decode, prompt = self.registry.serving(Role.DECODE), job.request.prompt_ids
        hits = self._prefixes.hits(decode, job, prompt)
        held = ((sum(hits.get(w.record.worker_id, NOTHING)), w.record.block_size) for w in decode)
        cached = max((blocks * size for blocks, size in held), default=0)
        images = job.request.images
        return max(len(prompt) - cached, 1) <= most and (images is None or cached >= images.end)

    # --- gateway.session.request_driver.Workers ------------------------------------------------------------

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
        prefill, decode = self.registry.serving(Role.PREFILL), self.registry.serving(Role.DECODE)
        if (adapter := job.request.adapter) is not None:
            prefill = self.adapter_loads.holders(prefill, adapter.digest)
            decode = self.adapter_loads.holders(decode, adapter.digest)
        encoders: list[EncoderCandidate] = []
        all_prefill = prefill
        if request.images_end:
            encoders = self._encoders(request)
            prefill = [w for w in prefill if reads_images(w.record, encoders)]
        hits = self._prefixes.hits([*prefill, *decode], job, token_ids)
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
        worker = self.registry.require(route.decode_id)
        target = worker.record
        if route.local is not LocalPrefill.NO:
            worker.unreported_local += request.tokens - route.matched_blocks * target.block_size
        return Placement(
            route,
            BY_COST if self._directory.connected else WITHOUT_INDEX,
            self._prefixes.namespace(job, target.kept),
            predicted_tokens=route.matched_blocks * target.block_size,
            encode_id=self._encoder_of(route, job, encoders),
        )

    def _encoders(self, request: RouteRequest) -> list[EncoderCandidate]:
        """Return the encode workers that may get an attempt; after a loss those first that live for sure."""
        workers = self.registry.serving(Role.ENCODE)
        workers = self._proven(workers) or workers
        return [w.encoder_candidate() for w in workers if w.record.worker_id not in request.avoid]

    def _encoder_of(self, route: Route, job: Job, candidates: Sequence[EncoderCandidate]) -> str | None:
        """Return the encode worker for an attempt; None without need, or where prefill encodes."""
        images = job.request.images
        if images is None or route.prefill_id is None:
            return None
        record = self.registry.require(route.prefill_id).record
        return choose_encoder(images.images[0].digest, images.rows, record, candidates)

    def _without_adapter(self, route: NoWorker, adapter: Adapter) -> NoWorker | NoProof | NoAdapter:
        """Return what an attempt without a pair has to wait for: its adapter, or a worker."""
        loads, digest = self.adapter_loads, adapter.digest
        serving = self.registry.serving(route.role)
        if loads.may_come(serving, digest):
            return NoProof()
        return route if not serving or loads.holders(serving, digest) else NoAdapter()

    def _choose_pair(
        self,
        request: RouteRequest,
        prefill: Sequence[Worker],
        decode: Sequence[Worker],
        hits: Mapping[str, Held],
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
        hits: Mapping[str, Held],
    ) -> Route | NoWorker:
        route = choose_route(request, *_candidates(prefill, decode, hits))
        return self._choose_local(request, route, decode, hits) or route

    def _choose_local(
        self,
        request: RouteRequest,
        remote: Route | NoWorker,
        decode: Sequence[Worker],
        hits: Mapping[str, Held],
    ) -> Route | None:
        """Return the route of a decode worker that computes the prompt itself, if that is the better one."""
        prefill = self.registry.serving(Role.PREFILL)
        token_s = prefill_token_s(w.rates for w in prefill or decode)
        return choose_local(
            request,
            remote,
            (w.local_candidate(hits.get(w.record.worker_id, NOTHING), token_s) for w in decode),
            self._local_prefill,
            token_s=token_s,
            fall_back=all(w.record.worker_id in request.avoid for w in prefill),
        )

    def _proven(self, workers: list[Worker]) -> list[Worker]:
        """Return the workers that were heard of after the last loss of another one."""
        return [w for w in workers if (w.link.last_seen or 0.0) >= self._lost_at + PROOF_MARGIN_S]

    def _is_silent(self, worker_id: str, since: float) -> bool:
        """Return whether the worker counts as linked, but nothing came from it since that time."""
        worker = self.registry.get(worker_id)
        seen = worker.link.last_seen if worker is not None and worker.link.up else math.inf
        return (seen or 0.0) < since + PROOF_MARGIN_S

    def _not_ejected(self, workers: Sequence[Worker]) -> list[Worker]:
        now = self._clock()
        return [w for w in workers if not self.ejections.is_ejected(w.record.worker_id, now)]

    def attach_attempt(self, worker_id: str, work: work_pb2.Work) -> None:
        """Send an attempt to its decode worker. Raises LinkDown."""
        worker = self.registry.require(worker_id)
        worker.link.send(decode_pb2.DecodeServiceLinkRequest(attach=work))
        worker.assign(work.id.request_id, work.id.attempt, len(work.token_ids), work.choices)

    def encode_attempt(self, worker_id: str, work: work_pb2.Work, images: PromptImages) -> None:
        """Send an attempt's images to its encode worker. Raises LinkDown."""
        worker = self.registry.require(worker_id)
        for part in image_parts(work, images):
            worker.link.send(encode_pb2.EncodeServiceLinkRequest(image=part))
        encode = encode_pb2.Encode(
            id=work.id,
            cache_namespace=work.cache_namespace,
            images=work.images,
            traceparent=work.traceparent,
            tracestate=work.tracestate,
        )
        worker.link.send(encode_pb2.EncodeServiceLinkRequest(encode=encode))
        worker.assign(work.id.request_id, work.id.attempt, images.rows, work.choices)

    def dispatch_attempt(
        self,
        worker_id: str,
        decode_id: str,
        work: work_pb2.Work,
        images: PromptImages | None = None,
        encoder: EncoderRoute | None = None,
    ) -> None:
        """Send an attempt to its prefill worker; its images' pixels first, where no encode worker has them.

        Raises LinkDown.
        """
        worker, target = self.registry.require(worker_id), self.registry.require(decode_id).record
        dispatch = prefill_pb2.Dispatch(
            work=work,
            decode_worker_id=decode_id,
            decode_address=target.address,
            decode_incarnation=target.incarnation,
        )
        if encoder is not None:
            encodes = self.registry.require(encoder.worker_id).record
            dispatch.encoder.worker_id, dispatch.encoder.address = encodes.worker_id, encodes.address
            dispatch.encoder.incarnation = encodes.incarnation
            dispatch.encoder.cached_tokens = encoder.cached_tokens
        elif images is not None:
            for part in image_parts(work, images):
                worker.link.send(prefill_pb2.PrefillServiceLinkRequest(image=part))
        worker.link.send(prefill_pb2.PrefillServiceLinkRequest(dispatch=dispatch))
        worker.assign(work.id.request_id, work.id.attempt, len(work.token_ids), work.choices)

    def cancel_attempt(
        self, role: Role, worker_id: str, work_id: str, attempt: int, choices: Sequence[int] = ()
    ) -> None:
        """Cancel choices of an attempt at a worker; none given means all that it still has.

        The loss of a link cancels all work that came over it, so a lost worker needs no message.
        """
        worker = self.registry.get(worker_id)
        if worker is None:
            return
        worker.complete(work_id, attempt, choices)
        if worker.link.up:
            worker.link.send(self._codecs[role.value].build_cancel(work_id, attempt, choices))

    # --- gateway.worker_pool.links.LinkListener -------------------------------------------------------------

    def on_up(self, worker_id: str) -> None:
        worker = self.registry.get(worker_id)
        if worker is not None:
            same_process = self._last_incarnation.get(worker_id) == worker.record.incarnation
            self._last_incarnation[worker_id] = worker.record.incarnation
            for dead in worker.record.dead:
                if not self.registry.is_linked(dead):  # else the loss of its link follows
                    self._listener.on_worker_up(dead, False)
            self.adapter_loads.reconcile()
            self._listener.on_worker_up(worker_id, same_process)
        self._on_change()

    def on_down(self, worker_id: str) -> None:
        worker = self.registry.get(worker_id)
        graceful = worker is not None and worker.leaving
        if not graceful:
            self._lost_at = asyncio.get_running_loop().time()
        if worker is not None:
            worker.on_down()
            self.ejections.forget(worker_id)
        self.pending_flushes.on_worker_down(worker_id)
        self.adapter_loads.on_down(worker_id)
        self._listener.on_worker_down(worker_id, graceful)
        if self.registry.is_replaced(worker_id):
            self._listener.on_worker_up(worker_id, False)
        self._on_change()

    def on_load(self, worker_id: str, load: Load) -> None:
        worker = self.registry.get(worker_id)
        if worker is None:
            return
        before = worker.load
        worker.on_load(load)
        self.adapter_loads.on_load(worker)
        if load.step_times:
            self.ejections.record(worker_id, worker.record.role, load.step_times, self._clock())
        if load.capacity != before.capacity:
            self._on_change()

    def on_events(self, worker_id: str, events: list[WorkerEvent]) -> None:
        worker = self.registry.get(worker_id)
        for item in events:
            if item.terminal and worker is not None:
                whole = worker.record.role != Role.DECODE.value  # its terminal message ends all choices
                worker.complete(item.work_id, item.attempt, () if whole else (item.choice,))
            if isinstance(item.event, AttemptFailed) and item.event.cause is Cause.ADAPTER_NOT_LOADED:
                self.adapter_loads.on_not_loaded(worker_id)
            if item.detail:
                _log.info("worker %s on %s/%d: %s", worker_id, item.work_id, item.attempt, item.detail)
        self._listener.on_events(events)

    def on_flushed(self, worker_id: str, flushed: Flushed) -> None:
        self.pending_flushes.on_flushed(worker_id, flushed)

    def on_adapter_answer(self, worker_id: str, answer: AdapterAnswer) -> None:
        self.adapter_loads.on_answer(worker_id, answer)


def _candidates(
    prefill: Sequence[Worker], decode: Sequence[Worker], hits: Mapping[str, Held]
) -> tuple[list[PrefillCandidate], list[DecodeCandidate]]:
    """Return the router's view of these workers; `hits`: blocks of the prompt by worker id."""
    token_s = prefill_token_s(w.rates for w in prefill or decode)
    return (
        [w.prefill_candidate(hits.get(w.record.worker_id, NOTHING), token_s) for w in prefill],
        [w.decode_candidate(hits.get(w.record.worker_id, NOTHING), token_s) for w in decode],
    )


def _identity(record: WorkerRecord) -> tuple[int, str, str]:
    return record.incarnation, record.address, record.role
