"""What decoding adds to the prefix cache, and telling the world of it."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.request import DecodeRequest
from engine.block_pool import BlockPool
from runtime.block_hash import block_keys


class Prefixes:
    """Publishes the blocks of requests; `changed(added, removed)` hears which keys came and went."""

    def __init__(
        self, pool: BlockPool, block_size: int, changed: Callable[[list[bytes], list[bytes]], None]
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._changed = changed

    def publish(self, request: DecodeRequest) -> None:
        """Enter the blocks that are full by now into the prefix cache.

        Only verified or locally computed KV gets here, so no quarantined block is ever shared. The last
        token's KV is not computed yet.
        """
        size, done = self._block_size, len(request.block_keys)
        full = (request.num_tokens - 1) // size
        if not request.attempt.cache_write or full <= done:
            return
        tokens = (request.attempt.prompt_ids + request.output_ids)[: full * size]
        parent = request.block_keys[-1] if done else b""
        for key in block_keys(
            request.attempt.cache_namespace, tokens, size, start=done * size, parent=parent
        ):
            self._pool.insert(request.block_ids[len(request.block_keys)], key, parent)
            request.block_keys.append(key)
            parent = key

    def tell(self) -> None:
        """Pass on what changed since the last time."""
        added, removed = self._pool.drain_events()
        if added or removed:
            self._changed(added, removed)
