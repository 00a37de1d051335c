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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diptych.runtime.discovery.records import WorkerRecord
from diptych.runtime.internal_tls import InternalTls
from diptych.worker.v1 import decode_pb2, encode_pb2, prefill_pb2, work_pb2
from gateway.adapters.adapter import Adapter
from gateway.attempt.types import AttemptFailed, Cause, EncoderRoute, Role
from gateway.attempt.work import Job
from gateway.model.images import PromptImages
from gateway.worker_pool.adapter_loads import AdapterLoads
from gateway.worker_pool.arrival_wait import ArrivalWait
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
from gateway.worker_pool.image_messages import image_parts
from gateway.worker_pool.links import Link, LinkTiming, PendingFlushes
from gateway.worker_pool.local_prefill import LocalMode
from gateway.worker_pool.placement import AttemptPlacer
from gateway.worker_pool.prefix_index import PrefixIndex, PrefixIndexReader
from gateway.worker_pool.registry import Worker, WorkerRegistry, new_worker
from gateway.worker_pool.router import (
    NoAdapter,
    NoProof,
    NoWorker,
    Placement,
    RouteRequest,
)

RECONCILE_S = 0.25
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
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.pending_flushes = PendingFlushes()
        self.ejections = Ejections()
        self.arrivals = ArrivalWait(lambda: self.registry.missing_role() is None, arrival_wait_s, clock)
        self.placer = AttemptPlacer(
            self.registry,
            self.adapter_loads,
            self.ejections,
            PrefixIndexReader(directory, identity.secret, identity.model_digest),
            has_index=lambda: directory.connected,
            local_prefill=local_prefill,
            clock=clock,
        )

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

    # --- gateway.session.request_driver.Workers ------------------------------------------------------------

    def place_attempt(
        self, request: RouteRequest, job: Job, token_ids: tuple[int, ...]
    ) -> Placement | NoWorker | NoProof | NoAdapter:
        """Choose the workers of an attempt; the placer says how."""
        return self.placer.place_attempt(request, job, token_ids)

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
            self.placer.on_loss(asyncio.get_running_loop().time())
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


def _identity(record: WorkerRecord) -> tuple[int, str, str]:
    return record.incarnation, record.address, record.role
