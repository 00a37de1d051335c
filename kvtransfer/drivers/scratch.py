"""Scratch: the own blocks of a copying prefill worker, which computes into them and pushes from them.

First come, first served: an ask to a decode worker is made only once there is room here, so that no decode
memory is pinned by a prompt that waits for scratch.

What is loaded from tiers or pulled from a decode worker enters the prefix cache as soon as it is verified,
what is computed once it is committed. A flush, or distrust here or at the decode worker, voids all that has
not entered by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.tiers.loaded import Loaded
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.kv.window_prefix import WindowPrefix
from diptych.engine.kv.window_table import PromptWindow
from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.errors import GrantDeniedError

_TIERS = ""
"""Source of blocks that were loaded from tiers, where others have the address of a decode worker."""


class Tiers(Protocol):
    """Tiers below scratch."""

    def __contains__(self, key: bytes) -> bool: ...

    async def fill(self, keys: Sequence[bytes], first: int, blocks: Sequence[int]) -> Loaded:
        """Load leading blocks of `keys[first:]`, verified, into `blocks`. Fails never: a miss is computed."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ScratchBlocks:
    """Blocks of one attempt, held until they are released; the cached prefix comes first."""

    block_ids: list[int]
    """Blocks for all of its tokens, of all layers but those in `window`."""
    cached_tokens: int
    keys: Sequence[bytes]
    epoch: int
    """Count of the events that voided blocks, when these were acquired."""
    num_tokens: int
    window: PromptWindow | None = None
    """Blocks of layers with a window, where these have blocks of their own."""
    loaded: Loaded | None = None
    """The part of the cached prefix that came from tiers for this attempt."""

    @property
    def held(self) -> list[int]:
        """Return all blocks."""
        if self.window is None:
            return self.block_ids
        return [*self.block_ids, *self.window.held]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    num_tokens: int
    keys: Sequence[bytes]
    blocks: asyncio.Future[ScratchBlocks]


class Scratch:
    """Blocks of one pool and its prefix cache; `changed(added, removed)` gets the keys that came and went.

    `chunk` is the most tokens of a prompt that are computed at once.
    """

    def __init__(
        self,
        memory: KVMemory,
        pool: BlockPool,
        changed: Callable[[list[bytes], list[bytes]], None] = lambda added, removed: None,
        chunk: int = 0,
    ) -> None:
        self.memory = memory
        self._chunk = max(chunk, 1)
        layout = memory.layout
        self._prefix = (
            None if layout.windows is None else WindowPrefix(pool, layout.windows, layout.block_size)
        )
        self._pool = pool
        self._changed = changed
        self.tiers: Tiers | None = None
        self._queue: list[_Waiting] = []
        self._epoch = 0
        self._pulled: dict[str, set[bytes]] = {}
        """Keys that were pulled or loaded, by source; some may have left the cache since."""
        self._most_noted = 2 * pool.total
        """Keys of a source at which those that lie nowhere any more are dropped."""

    async def acquire(self, num_tokens: int, keys: Sequence[bytes]) -> ScratchBlocks:
        """Wait for blocks for `num_tokens` tokens, and for what tiers have of them.

        Raises GrantDeniedError if they can never fit.
        """
        needed = self.memory.layout.prompt_blocks(num_tokens, self._chunk)
        if needed > self._pool.total:
            reason = work_pb2.FailureReason.FAILURE_REASON_EXCEEDS_KV_CAPACITY
            raise GrantDeniedError(
                reason, f"{needed} blocks are needed, the scratch pool has {self._pool.total}"
            )
        waiting = _Waiting(num_tokens, keys, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._serve()
        try:
            blocks = await waiting.blocks
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise
        if self.tiers is None:
            return blocks
        try:
            return await self._load(self.tiers, blocks, num_tokens)
        except BaseException:
            self.release(blocks, keep=False)
            raise

    def release(self, blocks: ScratchBlocks, *, keep: bool) -> None:
        """Return the blocks to the pool; `keep` enters the full, complete ones into the prefix cache."""
        if keep and self._insert(blocks, len(blocks.keys)):
            self._insert_window(blocks)
        self._pool.release(blocks.held)
        self._serve()
        self._report()

    def keep_pulled(self, blocks: ScratchBlocks, upto: int, source: str) -> None:
        """Enter the first `upto` blocks, verified copies from the decode worker at `source`."""
        if self._insert(blocks, upto):
            self._note(source, blocks.keys[blocks.cached_tokens // self.memory.layout.block_size : upto])
            self._report()

    def invalidate(self, blocks: ScratchBlocks) -> None:
        """Remove blocks that a failed row read, and what was built on them, from the prefix cache."""
        self._forget(blocks.keys[:1])

    def forget(self, source: str, keys: Sequence[bytes]) -> None:
        """Remove what the decode worker at `source` has forgotten: these keys and all that continues them.

        No keys stand for all that was pulled from there, and for all from tiers, where it may have stored it.
        """
        self._forget(keys or sorted(self._pulled.pop(source, set()) | self._pulled.pop(_TIERS, set())))

    def flush(self) -> int:
        """Remove every cached prefix; return the number of keys that went."""
        self._epoch += 1
        self._pulled.clear()
        forgotten = self._pool.clear_cache()
        self._serve()
        self._report()
        return forgotten

    def serve_waiting(self) -> None:
        """Give blocks to those that wait for them: some were released by other hands."""
        self._serve()

    def cached_keys(self) -> Collection[bytes]:
        """Return the keys of all cached blocks."""
        return self._pool.cached_keys()

    async def _load(self, tiers: Tiers, blocks: ScratchBlocks, num_tokens: int) -> ScratchBlocks:
        """Return the blocks with more of the prefix in them, where tiers have it."""
        size = self.memory.layout.block_size
        first, upto = blocks.cached_tokens // size, (num_tokens - 1) // size
        loaded = await tiers.fill(blocks.keys[:upto], first, blocks.block_ids[first:upto])
        cached = first + loaded.blocks.total()
        if cached == first:
            return blocks
        if self._insert(blocks, cached):
            self._note(_TIERS, blocks.keys[first:cached])
            self._report()
        return replace(blocks, cached_tokens=cached * size, loaded=loaded)

    def _note(self, source: str, keys: Sequence[bytes]) -> None:
        pulled = self._pulled.setdefault(source, set())
        pulled.update(keys)
        if len(pulled) > self._most_noted:
            cached, tiers = set(self._pool.cached_keys()), self.tiers
            lower = set() if tiers is None else {key for key in pulled if key in tiers}
            pulled.intersection_update(cached | lower)
            self._most_noted = 2 * max(self._pool.total, len(pulled))

    def _insert(self, blocks: ScratchBlocks, count: int) -> bool:
        """Enter the first `count` blocks into the cache; False if they were voided."""
        if blocks.epoch != self._epoch:
            return False
        parent = b""
        for block, key in zip(blocks.block_ids[:count], blocks.keys, strict=False):
            self._pool.insert(block, key, parent)  # False: another copy is there already
            parent = key
        return True

    def _insert_window(self, blocks: ScratchBlocks) -> None:
        """Enter the windowed blocks of the prompt's last places, and of those where it parts from others."""
        windows, size = self.memory.layout.windows, self.memory.layout.block_size
        if windows is None or blocks.window is None or self._prefix is None:
            return
        for place in range(windows.first_kept(blocks.num_tokens - 1, size), len(blocks.keys)):
            self._prefix.insert(blocks.window.blocks(place), blocks.keys[place])
        self._prefix.insert_shared(blocks.window, blocks.block_ids, blocks.keys)

    def _forget(self, keys: Sequence[bytes]) -> None:
        self._epoch += 1
        self._pool.forget(keys)
        self._serve()
        self._report()

    def _report(self) -> None:
        added, removed = self._pool.drain_events()
        if added or removed:
            self._changed(added, removed)

    def _serve(self) -> None:
        while self._queue:
            waiting = self._queue[0]
            blocks = self._try_allocate(waiting.num_tokens, waiting.keys)
            if blocks is None:
                return
            self._queue.pop(0)
            if waiting.blocks.cancelled():
                self._pool.release(blocks.held)
            else:
                waiting.blocks.set_result(blocks)

    def _withdraw(self, waiting: _Waiting) -> None:
        """Withdraw a waiter that was cancelled, perhaps just after it was served."""
        if waiting in self._queue:
            self._queue.remove(waiting)
            self._serve()
        elif not waiting.blocks.cancelled():
            self.release(waiting.blocks.result(), keep=False)

    def _try_allocate(self, num_tokens: int, keys: Sequence[bytes]) -> ScratchBlocks | None:
        if self._prefix is not None and self.memory.layout.windows is not None:
            return self._try_allocate_windows(self._prefix, self.memory.layout.windows, num_tokens, keys)
        block_size = self.memory.layout.block_size
        pins = self._pool.acquire_prefix(keys[: (num_tokens - 1) // block_size])
        fresh = self.memory.layout.blocks_for(num_tokens) - len(pins)
        if self._pool.available() < fresh:
            self._pool.release(pins)
            return None
        blocks = pins + self._pool.allocate(fresh)
        self._report()  # keys that made room
        return ScratchBlocks(blocks, len(pins) * block_size, keys, self._epoch, num_tokens)

    def _try_allocate_windows(
        self, prefix: WindowPrefix, groups: WindowGroups, num_tokens: int, keys: Sequence[bytes]
    ) -> ScratchBlocks | None:
        layout = self.memory.layout
        usable = keys[: (num_tokens - 1) // layout.block_size]
        hit, every = prefix.acquire(usable), layout.blocks_for(num_tokens)
        places = every - len(hit.full)
        tail = prefix.tail(usable, len(hit.full), every)
        rings = (
            (last, groups.ring_blocks(places, self._chunk, layout.block_size, last)) for last in (tail, 0)
        )
        fitting = next((one for one in rings if places + one[1] <= self._pool.available()), None)
        if fitting is None:
            self._pool.release(hit.blocks)
            return None
        tail, blocks = fitting
        fresh = self._pool.allocate(places + blocks)
        self._report()  # keys that made room
        ring = groups.ring_of(fresh[places:], every, tail)
        window = PromptWindow(groups.tables, hit.pinned, ring, len(hit.full))
        cached_tokens = len(hit.full) * layout.block_size
        return ScratchBlocks(hit.full + fresh[:places], cached_tokens, keys, self._epoch, num_tokens, window)
