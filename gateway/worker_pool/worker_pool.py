"""All workers of this gateway: found in the directory, linked, counted, and offered to the router.

The directory says which workers exist; the links say which of them answer. A worker whose lease ran out
stays as long as its link is up, and is chosen only when no leased one is there: Redis being away, flushed
or slow takes no worker from us, and a worker that drains (it says so, and gives up its lease) gets nothing
new. Nor does one that is suspected of hanging, or that is ejected for slowness, while there are others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diptych.runtime.discovery.records import WorkerRecord
from diptych.worker.v1 import decode_pb2, prefill_pb2, work_pb2
from gateway.attempt.types import Role
from gateway.attempt.work import Job
from gateway.worker_pool.codec import DecodeCodec, Flushed, LinkEvent, Load, PrefillCodec, WorkerCodec
from gateway.worker_pool.ejection import Ejections
from gateway.worker_pool.links import Link, LinkTiming
from gateway.worker_pool.pending_flushes import PendingFlushes
from gateway.worker_pool.placement import BY_COST, WITHOUT_INDEX, Placement
from gateway.worker_pool.prefix_lookup import PrefixIndexReader, PrefixMatch
from gateway.worker_pool.registry import WorkerRegistry
from gateway.worker_pool.router import NoWorker, Route, RouteRequest, choose
from gateway.worker_pool.worker import Worker, new_worker

RECONCILE_S = 0.25
_log = logging.getLogger(__name__)


class Directory(PrefixMatch, Protocol):
    """The local mirror of the Redis directory; its lookups do no I/O."""

    @property
    def connected(self) -> bool: ...
    def workers(self) -> list[WorkerRecord]: ...


class WorkerPoolListener(Protocol):
    """Who handles what the workers say."""

    def deliver(self, news: Sequence[LinkEvent]) -> None: ...
    def worker_gone(self, worker_id: str, left: bool) -> None: ...
    def worker_up(self, worker_id: str, returned: bool) -> None:
        """It is linked again, the very process if it `returned`, or another one is in its place."""


@dataclass(frozen=True, slots=True)
class GatewayIdentity:
    """Who we are to the workers, and which of them are ours."""

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
    ) -> None:
        self._directory = directory
        self._listener = listener
        self._identity = identity
        self._on_change = on_change
        self._timing = timing
        self._clock = clock
        self._wires: dict[str, WorkerCodec] = {
            "prefill": PrefillCodec(identity.gateway_id, identity.incarnation),
            "decode": DecodeCodec(identity.gateway_id, identity.incarnation),
        }
        self.roster = WorkerRegistry()
        self._met: dict[str, int] = {}  # by name, the incarnation that was linked last
        self._refused: set[tuple[str, int]] = set()  # said once in the log
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.flushes = PendingFlushes()
        self.ejections = Ejections()
        self._prefixes = PrefixIndexReader(directory, identity.secret, identity.model_digest)

    # --- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow(), name="fleet")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for worker in self.roster:
            self._remove(worker)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _follow(self) -> None:
        while True:
            try:
                self.reconcile()
            except Exception:  # one bad record must not end the following of all others
                _log.exception("the directory could not be read")
            await asyncio.sleep(RECONCILE_S)

    def reconcile(self) -> None:
        """Make the links match the directory's records."""
        records = {r.worker_id: r for r in self._directory.workers() if self._is_ours(r)}
        for worker in self.roster:
            record = records.get(worker.record.worker_id)
            worker.leased = record is not None
            replaced = record is not None and _identity(record) != _identity(worker.record)
            if replaced or (record is None and not worker.link.up):
                self._remove(worker)
        for worker_id, record in records.items():
            if worker_id not in self.roster:
                self._add(record)

    def _is_ours(self, record: WorkerRecord) -> bool:
        if record.model_digest == self._identity.model_digest and record.role in self._wires:
            return True
        key = (record.worker_id, record.incarnation)
        if key not in self._refused:
            self._refused.add(key)
            _log.warning("worker %s serves another model than this gateway: left alone", record.worker_id)
        return False

    def _add(self, record: WorkerRecord) -> None:
        link = Link(
            self._wires[record.role],
            self,
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            address=record.address,
            timing=self._timing,
        )
        self.roster.add(new_worker(record, link))
        link.start()

    def _remove(self, worker: Worker) -> None:
        worker_id = worker.record.worker_id
        self.roster.remove(worker_id)
        self.ejections.forget(worker_id)
        if worker.link.up:
            self._listener.worker_gone(worker_id, worker.leaving)
        task = asyncio.create_task(worker.link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # --- what is there --------------------------------------------------------------------------------

    def strangers(self) -> list[WorkerRecord]:
        """Workers of the directory that serve another model than this gateway."""
        return [record for record in self._directory.workers() if not self._is_ours(record)]

    def tokens_to_compute(self, job: Job) -> int:
        """Of the prompt, as predicted: what the decode worker that holds most of it does not hold."""
        prompt = job.request.prompt_ids
        decode = self.roster.serving(Role.DECODE)
        hits = self._prefixes.hits(decode, job, prompt)
        cached = max((hits.get(w.record.worker_id, 0) * w.record.block_size for w in decode), default=0)
        return max(len(prompt) - cached, 1)

    # --- gateway.session.request_driver.Workers ------------------------------------------------------------

    def place(self, request: RouteRequest, job: Job, token_ids: tuple[int, ...]) -> Placement | NoWorker:
        """Choose the pair for an attempt, by load and by who has its prefix."""
        prefill, decode = self.roster.serving(Role.PREFILL), self.roster.serving(Role.DECODE)
        hits = self._prefixes.hits(decode, job, token_ids)
        route = self._choose(request, self._not_ejected(prefill), self._not_ejected(decode), hits)
        if isinstance(route, NoWorker):  # slow is better than nothing
            route = self._choose(request, prefill, decode, hits)
        if isinstance(route, NoWorker):
            return route
        target = self.roster.listed(route.decode_id).record
        return Placement(
            route,
            BY_COST if self._directory.connected else WITHOUT_INDEX,
            self._prefixes.namespace(job, target.kv_dtype),
            predicted_tokens=route.matched_blocks * target.block_size,
        )

    def _choose(
        self,
        request: RouteRequest,
        prefill: Sequence[Worker],
        decode: Sequence[Worker],
        hits: Mapping[str, int],
    ) -> Route | NoWorker:
        return choose(
            request,
            (w.as_prefill() for w in prefill),
            (w.as_decode(hits.get(w.record.worker_id, 0)) for w in decode),
        )

    def _not_ejected(self, workers: Sequence[Worker]) -> list[Worker]:
        now = self._clock()
        return [w for w in workers if not self.ejections.ejected(w.record.worker_id, now)]

    def attach(self, worker_id: str, work: work_pb2.Work) -> None:
        worker = self.roster.listed(worker_id)
        worker.link.send(decode_pb2.DecodeServiceLinkRequest(attach=work))
        worker.given(work.id.request_id, work.id.attempt, len(work.token_ids), work.choices)

    def dispatch(self, worker_id: str, decode_id: str, work: work_pb2.Work) -> None:
        worker, target = self.roster.listed(worker_id), self.roster.listed(decode_id).record
        worker.link.send(
            prefill_pb2.PrefillServiceLinkRequest(
                dispatch=prefill_pb2.Dispatch(
                    work=work,
                    decode_worker_id=decode_id,
                    decode_address=target.address,
                    decode_incarnation=target.incarnation,
                )
            )
        )
        worker.given(work.id.request_id, work.id.attempt, len(work.token_ids), work.choices)

    def cancel(
        self, role: Role, worker_id: str, work_id: str, attempt: int, choices: Sequence[int] = ()
    ) -> None:
        """Without ``choices``: all that the worker still has of the attempt. Losing a link cancels what came
        over it, so a worker that is gone needs no message.
        """
        worker = self.roster.get(worker_id)
        if worker is None:
            return
        worker.done(work_id, attempt, choices)
        if worker.link.up:
            worker.link.send(self._wires[role.value].cancel(work_id, attempt, choices))

    # --- gateway.worker_pool.links.LinkListener -------------------------------------------------------------

    def on_up(self, worker_id: str) -> None:
        worker = self.roster.get(worker_id)
        if worker is not None:
            returned = self._met.get(worker_id) == worker.record.incarnation
            self._met[worker_id] = worker.record.incarnation
            for dead in worker.record.dead:
                if not self.roster.linked_to(dead):  # else its end is still to be seen here
                    self._listener.worker_up(dead, False)
            self._listener.worker_up(worker_id, returned)
        self._on_change()

    def on_down(self, worker_id: str) -> None:
        worker = self.roster.get(worker_id)
        left = worker is not None and worker.leaving
        if worker is not None:
            worker.lost()
            self.ejections.forget(worker_id)
        self.flushes.lost(worker_id)
        self._listener.worker_gone(worker_id, left)
        if self.roster.replaced(worker_id):
            self._listener.worker_up(worker_id, False)
        self._on_change()

    def on_load(self, worker_id: str, load: Load) -> None:
        worker = self.roster.get(worker_id)
        if worker is None:
            return
        before = worker.load
        worker.reported(load)
        if load.step_times:
            self.ejections.report(worker_id, worker.record.role, load.step_times, self._clock())
        if load.capacity != before.capacity:
            self._on_change()

    def on_news(self, worker_id: str, news: list[LinkEvent]) -> None:
        worker = self.roster.get(worker_id)
        for item in news:
            if item.last_word and worker is not None:
                whole = worker.record.role == Role.PREFILL.value  # its last word is on all choices
                worker.done(item.work_id, item.attempt, () if whole else (item.choice,))
            if item.detail:
                _log.info("worker %s on %s/%d: %s", worker_id, item.work_id, item.attempt, item.detail)
        self._listener.deliver(news)

    def on_flushed(self, worker_id: str, flushed: Flushed) -> None:
        self.flushes.answered(worker_id, flushed)


def _identity(record: WorkerRecord) -> tuple[int, str, str]:
    return record.incarnation, record.address, record.role
