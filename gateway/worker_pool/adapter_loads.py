"""The adapters of each linked worker: what it has, what it was asked to load or to forget, what it refused.

Every worker gets every adapter that is needed, as soon as it is linked: a worker that was restarted has them
again before a request needs one, and a request that is there earlier waits until it is routed. What this
gateway dropped is unloaded once none of its requests uses it any more. Other gateways may name what this one
does not know: that stays.

A worker's heartbeat says what it has; an answer says it some 100 ms earlier. A load that failed is tried
again after `RETRY_S`, for its file may come.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from gateway.adapters.adapter import Adapter
from gateway.worker_pool.codec import AdapterAnswer
from gateway.worker_pool.registry import Worker, WorkerRegistry

RETRY_S: Final = 10.0
NO_ADAPTERS: Final = "it computes no adapters (its --max-loras is 0, or its backend has none)"
_MAX_DROPPED: Final = 256
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    """A load or an unload without an answer."""

    digest: bytes
    load: bool
    answer: asyncio.Future[str]


@dataclass(slots=True)
class _Holdings:
    """Adapters of one worker. ``early``: loaded by an answer, in no heartbeat so far."""

    has: frozenset[bytes] = frozenset()
    early: set[bytes] = field(default_factory=set)
    asked: dict[int, _Asked] = field(default_factory=dict)
    refused: dict[bytes, tuple[str, float]] = field(default_factory=dict)  # reason, and time of the next try

    def on_its_way(self, digest: bytes, *, load: bool) -> asyncio.Future[str] | None:
        """Return the answer to come of a load, or of an unload, of this adapter."""
        found = (one.answer for one in self.asked.values() if one.load is load and one.digest == digest)
        return next(found, None)


class AdapterLoads:
    """The adapters in the workers' memory.

    Args:
        registry: of the workers.
        needed: returns the adapters that all of them must have, by digest.
        clock: seconds, monotonic.
    """

    def __init__(
        self, registry: WorkerRegistry, needed: Callable[[], dict[bytes, Adapter]], clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._needed = needed
        self._clock = clock
        self._numbers = itertools.count(1)
        self._workers: dict[str, _Holdings] = {}
        self._dropped: OrderedDict[bytes, None] = OrderedDict()

    # --- for the router -------------------------------------------------------------------------------

    def holders(self, workers: Iterable[Worker], digest: bytes) -> list[Worker]:
        """Return those of the workers that have this adapter."""
        return [w for w in workers if digest in self._of(w).has]

    def may_come(self, workers: Iterable[Worker], digest: bytes) -> bool:
        """Return whether one of the workers without this adapter is to have it soon."""
        return any(digest not in (of := self._of(w)).has and digest not in of.refused for w in workers)

    def refusals(self, digest: bytes) -> list[str]:
        """Return why workers do not have it, each with its worker."""
        found = ((worker_id, of.refused.get(digest)) for worker_id, of in self._workers.items())
        return [f"{worker_id}: {refused[0]}" for worker_id, refused in found if refused is not None]

    def workers_with(self, digest: bytes) -> list[str]:
        return sorted(worker_id for worker_id, of in self._workers.items() if digest in of.has)

    # --- orders ---------------------------------------------------------------------------------------

    def load(self, worker: Worker, adapter: Adapter) -> asyncio.Future[str]:
        """Ask a worker to load an adapter. The future has "" when it is there, else why not.

        One that is lost before it answers has refused nothing.
        """
        of = self._of(worker)
        if (running := of.on_its_way(adapter.digest, load=True)) is not None:
            return running
        if worker.reported and not worker.load.max_loras:
            self._note_refusal(worker.record.worker_id, of, adapter.digest, NO_ADAPTERS)
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            answer.set_result(NO_ADAPTERS)
            return answer
        number, answer = self._ask(of, adapter.digest, load=True)
        worker.link.send(worker.link.codec.build_load_adapter(number, adapter))
        return answer

    def unload(self, worker: Worker, digest: bytes) -> asyncio.Future[str]:
        """Ask a worker to forget an adapter; it answers when none of its attempts uses it any more."""
        of = self._of(worker)
        of.has, of.early = of.has - {digest}, of.early - {digest}  # no new request gets there
        number, answer = self._ask(of, digest, load=False)
        worker.link.send(worker.link.codec.build_unload_adapter(number, digest))
        return answer

    async def load_all(self, adapter: Adapter) -> list[str]:
        """Load an adapter on every linked worker; return what is wrong, worker by worker."""
        self._dropped.pop(adapter.digest, None)
        linked = self._registry.linked_with_text()
        for worker in linked:
            self._of(worker).refused.pop(adapter.digest, None)
        answers = await _all(self.load(worker, adapter) for worker in linked)
        return [f"{w.record.worker_id}: {why}" for w, why in zip(linked, answers, strict=True) if why]

    async def unload_all(self, digest: bytes) -> None:
        """Unload an adapter from every linked worker, and return when none has it."""
        self.drop(digest)
        answers = []
        for worker in self._registry.linked_with_text():
            of = self._of(worker)
            if (answer := of.on_its_way(digest, load=False)) is not None:
                answers.append(answer)
            elif digest in of.has or of.on_its_way(digest, load=True) is not None:
                answers.append(self.unload(worker, digest))
        await _all(answers)

    def drop(self, digest: bytes) -> None:
        """Let workers forget an adapter, once no request here needs it, when they say that they have it."""
        self._dropped[digest] = None
        self._dropped.move_to_end(digest)
        if len(self._dropped) > _MAX_DROPPED:
            self._dropped.popitem(last=False)

    def reconcile(self) -> None:
        """Ask for what is missing, and unload what was dropped. Call it now and then, and after changes."""
        needed = self._needed()
        if not needed and not self._dropped:
            return
        now = self._clock()
        for worker in self._registry.linked_with_text():
            of = self._of(worker)
            for digest in of.refused.keys() - needed.keys():
                del of.refused[digest]
            for digest, adapter in needed.items():
                refused = of.refused.get(digest)
                if digest not in of.has and (refused is None or now >= refused[1]):
                    self.load(worker, adapter)
            unloading = {one.digest for one in of.asked.values() if not one.load}
            for digest in self._dropped.keys() - needed.keys() - unloading:
                if digest in of.has:
                    self.unload(worker, digest)

    # --- what workers say -----------------------------------------------------------------------------

    def on_load(self, worker: Worker) -> None:
        """Take over what a heartbeat lists."""
        digests = worker.load.adapters
        if not digests and worker.record.worker_id not in self._workers:
            return
        of = self._of(worker)
        if not worker.load.max_loras:  # it may not know such orders, and never answer
            for number in [number for number, one in of.asked.items() if one.load]:
                self.on_answer(worker.record.worker_id, AdapterAnswer(number, NO_ADAPTERS))
        leaving = {one.digest for one in of.asked.values() if not one.load}
        of.has = (frozenset(digests) | of.early) - leaving
        of.early = set()

    def on_answer(self, worker_id: str, answer: AdapterAnswer) -> None:
        """Complete a load or an unload."""
        of = self._workers.get(worker_id)
        asked = None if of is None else of.asked.pop(answer.number, None)
        if of is None or asked is None:
            return
        if asked.load and answer.failure:
            self._note_refusal(worker_id, of, asked.digest, answer.failure)
        elif asked.load:
            of.refused.pop(asked.digest, None)
            of.has |= {asked.digest}
            of.early.add(asked.digest)
        else:
            of.has -= {asked.digest}
        if not asked.answer.done():
            asked.answer.set_result(answer.failure)

    def on_not_loaded(self, worker_id: str) -> None:
        """Forget what a worker has, which refused an attempt for it: its next heartbeat says it."""
        if (of := self._workers.get(worker_id)) is not None:
            of.has, of.early = frozenset(), set()

    def on_down(self, worker_id: str) -> None:
        """Forget a worker whose link ended: what it was asked for is not refused, and not there."""
        of = self._workers.pop(worker_id, None)
        for asked in () if of is None else of.asked.values():
            if not asked.answer.done():
                asked.answer.set_result("")

    # --- parts ----------------------------------------------------------------------------------------

    def _of(self, worker: Worker) -> _Holdings:
        return self._workers.setdefault(worker.record.worker_id, _Holdings())

    def _ask(self, of: _Holdings, digest: bytes, *, load: bool) -> tuple[int, asyncio.Future[str]]:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        of.asked[number] = _Asked(digest, load, answer)
        return number, answer

    def _note_refusal(self, worker_id: str, of: _Holdings, digest: bytes, why: str) -> None:
        if of.refused.get(digest, ("", 0.0))[0] != why:  # once per reason, not with every try
            _log.warning("worker %s does not load adapter %s: %s", worker_id, digest.hex()[:12], why)
        of.refused[digest] = why, self._clock() + RETRY_S


async def _all(answers: Iterable[asyncio.Future[str]]) -> list[str]:
    """Wait for answers that others may wait for as well: they stay when this wait is cancelled."""
    return await asyncio.gather(*map(asyncio.shield, answers))
