"""A gateway's copy of the directory. Look-ups read memory only: Redis can neither delay nor fail one.

One background task reads: it notes the end of the update stream, loads every live worker's blocks,
then follows the stream and looks at the leases twice a second. While Redis is away the copy stays as
it was. For the length of a lease after Redis came back, or came back empty, a missing lease is no
sign of death: the workers need that time to write theirs again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from diptych.runtime.discovery import store
from diptych.runtime.discovery.outage_log import OutageLog, error_code
from diptych.runtime.discovery.prefix_index import PrefixIndex, PrefixSnapshot
from diptych.runtime.discovery.records import Identity, Lease, WorkerRecord
from diptych.runtime.task_cancellation import end_task

_POLL_S = 0.5
_BLOCK_MS = 200
_PAGE = 500
_RETRY_S = (0.05, 0.1, 0.2, 0.5)
_GRACE_S = store.LEASE_MS / 1000
_FIRST_SYNC_S = 1.0

_MAX_PASSED_OVER = 1024  # lines about junk, in all

_Page = tuple[int, dict[bytes, bytes]]

_log = logging.getLogger(__name__)


class DirectoryMirror:
    """Live workers and their cached prefixes, as last read. Used on the event loop's thread."""

    def __init__(self, redis_url: str) -> None:
        """Raises ValueError for a malformed URL."""
        self._redis: Redis = store.connect(redis_url)
        self._outages = OutageLog(redis_url)
        self._leases: dict[str, Lease] = {}
        self._index = PrefixIndex()
        # Workers whose lease named more than we had at the last poll, and what we had then.
        self._behind: dict[str, tuple[Identity, int]] = {}
        self._unreadable: set[str] = set()  # what was passed over and logged
        self._position = "0-0"
        self._generation: bytes | None = None
        self._grace_until = 0.0
        self._connected = False
        self._synced = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """True while the copy follows Redis at this moment; a frozen one is noticed within a second."""
        return self._connected

    @property
    def outage(self) -> str:
        """Cause for which the copy does not follow Redis, in a few words; empty while it does."""
        return "" if self._connected else self._outages.cause

    def workers(self) -> list[WorkerRecord]:
        """Return the workers with a live lease; those last known while Redis is away."""
        return [lease.record for lease in self._leases.values()]

    def prefix_hits(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Count the leading blocks of a prompt, given its block keys, that each worker can use, if any."""
        hits = {
            worker_id: self._index.usable_hits(worker_id, record.identity, keys, record.window_reach)
            for worker_id, record in ((worker_id, lease.record) for worker_id, lease in self._leases.items())
        }
        return {worker_id: count for worker_id, count in hits.items() if count}

    def tier_hits(self, keys: Sequence[bytes], hits: Mapping[str, int]) -> dict[str, int]:
        """Count the blocks that follow the `hits` of a prompt and lie in a worker's tiers."""
        found = {
            worker_id: self._index.tier_hits(worker_id, lease.record.identity, keys, hits.get(worker_id, 0))
            for worker_id, lease in self._leases.items()
        }
        return {worker_id: count for worker_id, count in found.items() if count}

    async def start(self) -> None:
        """Start following; returns when the first copy is complete, or after a second without Redis."""
        self._task = asyncio.create_task(self._run(), name="directory-mirror")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_SYNC_S):
                await self._synced.wait()

    async def close(self) -> None:
        await end_task(self._task)
        with contextlib.suppress(*store.STORE_ERRORS):
            await self._redis.aclose()

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._synchronise()
                failures = 0
                await self._follow()
            except store.STORE_ERRORS as error:
                if said := self._outages.failed(error, asyncio.get_running_loop().time()):
                    _log.warning("%s; routing from memory", said)
            except Exception:
                _log.exception("following the directory failed; trying on")
            self._connected = False
            failures += 1
            with contextlib.suppress(*store.STORE_ERRORS):
                await self._redis.connection_pool.disconnect()
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S)) - 1])

    async def _synchronise(self) -> None:
        """Read the whole copy anew; a worker whose number did not move is not read again."""
        self._grace_until = asyncio.get_running_loop().time() + _GRACE_S
        # First the stream's end, then the content: an update in between is seen twice, never missed.
        newest: Any = await self._redis.xrevrange(store.STREAM, count=1)
        self._position = newest[0][0].decode() if newest else "0-0"
        await self._read_leases()
        for worker_id in list(self._leases):
            await self._load(worker_id)
        if not self._connected and self._outages.answered():
            _log.info("following the directory: %d workers", len(self._leases))
        self._connected = True
        self._synced.set()

    async def _follow(self) -> None:
        """Take in updates and leases until Redis fails."""
        loop = asyncio.get_running_loop()
        next_poll = loop.time() + _POLL_S
        while True:
            answer = await self._redis.xread({store.STREAM: self._position}, count=64, block=_BLOCK_MS)
            await self._take_in(_entries(answer))
            if loop.time() >= next_poll:
                emptied = await self._read_leases()
                if emptied:
                    await self._synchronise()
                next_poll = loop.time() + _POLL_S

    async def _take_in(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        stale: dict[str, None] = {}
        for position, fields in entries:
            self._position = position.decode()
            try:
                event = store.decode_event(fields)
            except ValueError as error:
                self._pass_over("an update", error)
                continue
            if not self._index.apply(event):
                stale[event.worker_id] = None
        if stale:
            await self._read_leases()
            for worker_id in stale:
                await self._load(worker_id)

    async def _read_leases(self) -> bool:
        """Take in who lives. True when the store lost its data since the last time."""
        members: Any = await self._redis.smembers(store.WORKERS)
        worker_ids = sorted(name for member in members if (name := self._readable(member)) is not None)
        answers: Any = await self._redis.mget(
            [store.GENERATION, *(store.worker_key(worker_id) for worker_id in worker_ids)]
        )
        generation, *values = answers
        now = asyncio.get_running_loop().time()
        emptied = self._generation is not None and generation != self._generation
        if emptied:
            self._grace_until = now + _GRACE_S
        self._generation = generation
        expired = [worker_id for worker_id, value in zip(worker_ids, values, strict=True) if value is None]
        self._take_in_leases(dict(zip(worker_ids, values, strict=True)), may_drop=now >= self._grace_until)
        if expired and now >= self._grace_until:
            # A worker that lives after all adds itself again with its next renewal.
            await self._redis.srem(store.WORKERS, *expired)
        await self._catch_up()
        return emptied

    def _readable(self, member: bytes) -> str | None:
        """Return a member as the id of a worker; None, and a line in the log, for what is none."""
        try:
            return member.decode()
        except UnicodeDecodeError:
            self._pass_over(f"member {member[:64]!r}", "it is not UTF-8")
            return None

    def _pass_over(self, what: str, why: object) -> None:
        """Log, once for each, what another program has put among our keys."""
        if what not in self._unreadable and len(self._unreadable) < _MAX_PASSED_OVER:
            self._unreadable.add(what)
            _log.warning("passed over %s in the directory: %s", what, why)

    def _take_in_leases(self, values: dict[str, bytes | None], *, may_drop: bool) -> None:
        for worker_id in [w for w in self._leases if values.get(w) is None and may_drop]:
            del self._leases[worker_id]
            self._behind.pop(worker_id, None)
            self._index.drop(worker_id)
        for worker_id, value in values.items():
            if value is None:
                continue
            try:
                self._leases[worker_id] = Lease.from_json(value)
            except ValueError as error:
                self._pass_over(f"the unreadable lease of worker {worker_id[:64]!r}", error)

    async def _catch_up(self) -> None:
        """Read the blocks of workers that are new, or whose updates stopped short of what their lease says.

        Leases are read apart from the stream, so a lease that is ahead means something only when no
        update came for a whole poll.
        """
        for worker_id, lease in list(self._leases.items()):
            position = self._index.position(worker_id)
            identity = lease.record.identity
            if position is not None and position[0] == identity and position[1] >= lease.prefix_seq:
                self._behind.pop(worker_id, None)
            elif position is None or self._behind.get(worker_id) == position:
                await self._load(worker_id)
            else:
                self._behind[worker_id] = position

    async def _load(self, worker_id: str) -> None:
        """Read all of a worker's blocks, unless what we have is just that."""
        try:
            await self._load_blocks(worker_id)
        except (ValueError, ResponseError) as error:
            if isinstance(error, ResponseError) and error_code(error) != "WRONGTYPE":
                raise
            self._pass_over(f"the blocks of worker {worker_id[:64]!r}", error)

    async def _load_blocks(self, worker_id: str) -> None:
        lease = self._leases.get(worker_id)
        if lease is None:
            return
        identity = lease.record.identity
        owned = store.owned_key(worker_id, identity)
        seq = await self._redis.hget(owned, store.SEQ_FIELD.decode())
        if seq is None or self._index.position(worker_id) == (identity, int(seq)):
            return
        media: dict[bytes, bytes] = {}
        cursor = 0
        while True:
            # Small pages: parsing one must not hold the event loop for longer than a millisecond.
            cursor, page = cast(_Page, await self._redis.hscan(owned, cursor, count=_PAGE))
            media.update(page)
            if cursor == 0:
                break
        media.pop(store.SEQ_FIELD, None)
        tiered = [key for key, medium in media.items() if medium == store.TIERED]
        self._index.load(PrefixSnapshot(worker_id, identity, int(seq), media.keys() - set(tiered), tiered))


def _entries(answer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of the one stream in an XREAD's answer, which is empty when nothing came."""
    return answer[0][1] if answer else []
