"""A worker's hand in the directory: its lease, its load, and which prefix blocks it holds.

One background task does all the writing. `set_load` and `prefix_changed` only note what to say, so
the engine's loop never waits. The life of the task:

1. open: count the epoch up, write all blocks the cache holds, announce them, take the lease;
2. every second renew the lease, in between send what changed, in numbered batches;
3. when Redis fails, try again until it answers, then go on where it stopped. A batch whose answer
   was lost goes out again under its number and is harmless. If the store is not where we left it
   (flushed, restarted empty, failed over to an older copy), start again at 1 with a new epoch;
4. when another process holds the lease, end: two by one name would take it from each other for ever, and
   gateways go from the one to the other. The newer one stays, as a rule.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import secrets
from collections.abc import Callable, Collection, Iterable

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from diptych.runtime.discovery import store
from diptych.runtime.discovery.outage_log import OutageLog
from diptych.runtime.discovery.prefix_index import PrefixEvent
from diptych.runtime.discovery.records import Lease, WorkerLoad, WorkerRecord
from diptych.runtime.task_cancellation import end_task

_RENEW_S = 1.0
_COALESCE_S = 0.1
_BATCH_KEYS = 512
_MAX_PENDING = 100_000
_RETRY_S = (0.1, 0.2, 0.5, 1.0)
_CLOSE_S = 0.5

_log = logging.getLogger(__name__)


class _Replaced(Exception):
    """Another process has this worker's name."""


class DirectoryPublisher:
    """Keeps one worker in the directory. All calls are made on the event loop's thread."""

    def __init__(
        self,
        redis_url: str,
        record: WorkerRecord,
        owned_keys: Callable[[], Collection[bytes]] = tuple,
        tiered_keys: Callable[[], Collection[bytes]] = tuple,
    ) -> None:
        """`owned_keys` returns the keys of all blocks in the worker's prefix cache, parents first or not.

        `tiered_keys` returns those of the blocks in its tiers, which may be in the cache as well. Raises
        ValueError for a malformed URL.
        """
        self._redis: Redis = store.connect(redis_url)
        self._outages = OutageLog(redis_url)
        self._record = record
        self._owned_keys = owned_keys
        self._tiered_keys = tiered_keys
        self._load = WorkerLoad()
        self._seq = 0
        # key -> its medium from now on, None for removed; in order of happening
        self._pending: dict[bytes, bytes | None] = {}
        self._in_flight: PrefixEvent | None = None
        self._reopen = True
        self._generation: bytes | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._connected = False
        self._published = False  # ever
        self._replaced = False

    @property
    def replaced(self) -> bool:
        """True once another process has the worker's name, and this one takes no part any more."""
        return self._replaced

    @property
    def connected(self) -> bool:
        """True if the last exchange with Redis succeeded."""
        return self._connected

    @property
    def record(self) -> WorkerRecord:
        """Record as published; its epoch is 0 until Redis has given one."""
        return self._record.with_load(self._load)

    async def start(self) -> None:
        """Start publishing in the background and returns at once, whether Redis is there or not."""
        self._task = asyncio.create_task(self._run(), name="directory-publisher")

    def set_load(self, *, running: int, waiting: int, waiting_tokens: int, free_blocks: int) -> None:
        """Note the load; it goes out with the next renewal of the lease."""
        self._load = WorkerLoad(running, waiting, waiting_tokens, free_blocks)

    def prefix_changed(
        self, added: Iterable[bytes], removed: Iterable[bytes], tiered: Iterable[bytes] = ()
    ) -> None:
        """Note blocks that entered and left the prefix cache; they go out some 100 ms later, together.

        `tiered`: blocks that are in a tier only from now on.
        """
        for keys, medium in ((removed, None), (tiered, store.TIERED), (added, store.POOL)):
            for key in keys:
                self._pending.pop(key, None)
                self._pending[key] = medium
        if len(self._pending) > _MAX_PENDING:
            # Redis has been away for long: writing the whole list again is cheaper than its history.
            self._start_again()
        if self._pending:
            self._wake.set()

    def cleared(self) -> None:
        """Begin a new epoch after the prefix cache was emptied: it voids all that was published before."""
        self._start_again()
        self._wake.set()

    async def close(self) -> None:
        """End the lease, so that routers stop at once. Waits half a second at most."""
        await end_task(self._task)
        try:
            async with asyncio.timeout(_CLOSE_S):
                others = await self._is_others()
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.delete(self._owned)
                    if not others:
                        pipe.delete(store.worker_key(self._record.worker_id))
                        pipe.srem(store.WORKERS, self._record.worker_id)
                    await pipe.execute()
        except store.STORE_ERRORS as error:
            _log.info("the lease was left to expire: %s", type(error).__name__)
        with contextlib.suppress(*store.STORE_ERRORS):
            await self._redis.aclose()

    @property
    def _owned(self) -> str:
        return store.owned_key(self._record.worker_id, self._record.identity)

    def _start_again(self) -> None:
        self._reopen = True
        self._pending.clear()
        self._in_flight = None

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._follow()
            except _Replaced:
                self._connected, self._replaced = False, True
                _log.error(
                    "another process is worker %s by now: this one gets nothing any more. Names are for one "
                    "process at a time (--worker-id)",
                    self._record.worker_id,
                )
                return
            except store.STORE_ERRORS as error:
                failures = 1 if self._connected else failures + 1
                if said := self._outages.failed(error, asyncio.get_running_loop().time()):
                    _log.warning("%s; trying on", said)
            except Exception:
                failures += 1
                _log.exception("publishing in the directory failed; trying on")
            self._connected = False
            with contextlib.suppress(*store.STORE_ERRORS):
                await self._redis.connection_pool.disconnect()
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S)) - 1])

    async def _follow(self) -> None:
        """Publish until Redis fails."""
        loop = asyncio.get_running_loop()
        while True:
            if self._published and await self._is_others():
                raise _Replaced
            if self._reopen:
                await self._open()
            await self._renew()
            self._published = True
            if not self._connected:
                self._connected = True
                if self._outages.answered():
                    _log.info("published in the directory, epoch %d", self._record.epoch)
            next_renewal = loop.time() + _RENEW_S
            while not self._reopen and (left := next_renewal - loop.time()) > 0:
                await self._flush()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._wake.wait()
                        await asyncio.sleep(_COALESCE_S)
                self._wake.clear()

    async def _open(self) -> None:
        """Publish a new epoch, from the whole content of the cache."""
        worker_id, outdated = self._record.worker_id, self._owned
        counted = await self._count_epoch()
        self._record = dataclasses.replace(self._record, epoch=max(counted, self._record.epoch + 1))
        # No await between these lines: what changes later is noted as a change.
        self._start_again()
        self._reopen = False
        owned = dict.fromkeys(self._owned_keys())
        tiered = [key for key in self._tiered_keys() if key not in owned]
        self._seq, self._generation = 0, None
        try:
            await self._redis.delete(outdated, self._owned)
            for keys, medium in ((list(owned), store.POOL), (tiered, store.TIERED)):
                for start in range(0, len(keys), _BATCH_KEYS):
                    batch = keys[start : start + _BATCH_KEYS]
                    await self._redis.hset(self._owned, items=store.hash_fields(batch, medium))
            await self._send(PrefixEvent(worker_id, self._record.identity, seq=1))
        except BaseException:
            self._reopen = True
            raise

    async def _count_epoch(self) -> int:
        """Return the next epoch by the store's count; one that lost its data counts from 1 again."""
        key = store.epoch_key(self._record.worker_id)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.incr(key)
            pipe.expire(key, store.EPOCH_S)
            counted, _ = await pipe.execute()
        return int(counted)

    async def _is_others(self) -> bool:
        """Return whether the lease is another process's."""
        found = await self._redis.get(store.worker_key(self._record.worker_id))
        try:
            return found is not None and Lease.from_json(found).record.incarnation != self._record.incarnation
        except ValueError:
            return False  # garbage, which is written over

    async def _renew(self) -> None:
        """Renew the lease; ask for a new epoch when the store is not where we left it."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(store.GENERATION, secrets.token_hex(8), nx=True)
            pipe.get(store.GENERATION)
            pipe.hget(self._owned, store.SEQ_FIELD.decode())
            self._write_lease(pipe, self._seq)
            _, generation, seq, *_ = await pipe.execute()
        expected = {self._seq} if self._in_flight is None else {self._seq, self._in_flight.seq}
        if (
            seq is None
            or not seq.isdigit()
            or int(seq) not in expected
            or self._generation not in (None, generation)
        ):
            _log.warning("the directory lost this worker's entries; publishing them again")
            self._start_again()
        self._generation = generation

    async def _flush(self) -> None:
        """Send all noted changes in numbered batches."""
        while self._pending or self._in_flight is not None:
            if self._in_flight is None:
                batch = list(itertools.islice(self._pending.items(), _BATCH_KEYS))
                for key, _ in batch:
                    del self._pending[key]
                self._in_flight = PrefixEvent(
                    self._record.worker_id,
                    self._record.identity,
                    self._seq + 1,
                    added=tuple(key for key, medium in batch if medium == store.POOL),
                    removed=tuple(key for key, medium in batch if medium != store.POOL),
                    tiered=tuple(key for key, medium in batch if medium == store.TIERED),
                )
            await self._send(self._in_flight)

    async def _send(self, event: PrefixEvent) -> None:
        """Write blocks, number, lease and announcement in one transaction."""
        async with self._redis.pipeline(transaction=True) as pipe:
            if event.removed:
                pipe.hdel(self._owned, *event.removed)
            held = store.hash_fields(event.added) + store.hash_fields(event.tiered, store.TIERED)
            pipe.hset(self._owned, items=[*held, store.SEQ_FIELD, event.seq])
            self._write_lease(pipe, event.seq)
            pipe.xadd(store.STREAM, store.encode_event(event), maxlen=store.STREAM_LENGTH, approximate=True)
            await pipe.execute()
        if not self._reopen:
            self._seq, self._in_flight = event.seq, None

    def _write_lease(self, pipe: Pipeline, seq: int) -> None:
        worker_id = self._record.worker_id
        pipe.set(store.worker_key(worker_id), Lease(self.record, seq).to_json(), px=store.LEASE_MS)
        pipe.sadd(store.WORKERS, worker_id)
        pipe.pexpire(self._owned, store.OWNED_MS)
