"""The blocks that decoding adds to the prefix cache, and the report of changes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from decode_worker.kv_events.journal import Journal
from diptych.engine.kv.block_pool import BlockPool
from diptych.runtime.block_hash import block_keys
from diptych.worker_process.attempt import Attempt


class PrefixPublisher:
    """Publishes the blocks of sequences; `changed(added, removed)` gets the keys that came and went."""

    def __init__(
        self, pool: BlockPool, block_size: int, changed: Callable[[list[bytes], list[bytes]], None]
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._changed = changed
        self.journal: Journal | None = None
        """Told the tokens of blocks, where what the cache holds is exported."""

    def publish(
        self,
        attempt: Attempt,
        computed: int,
        block_ids: Sequence[int],
        *,
        output_ids: Sequence[int] | None = None,
        keys: list[bytes] | None = None,
    ) -> list[bytes]:
        """Enter the full blocks of the first `computed` tokens into the prefix cache; return all their keys.

        The tokens are the attempt's prompt and `output_ids` (the tokens delivered before it, if none are
        given). `keys` are those of the first blocks, entered before; the list grows. Only verified or locally
        computed KV gets here, so that no quarantined block is ever shared.
        """
        keys = [] if keys is None else keys
        size, done = self._block_size, len(keys)
        full = computed // size
        if not attempt.cache_write or full <= done:
            return keys
        output = attempt.delivered_ids if output_ids is None else output_ids
        prompt = attempt.prompt_ids
        start, end = (max(place * size - len(prompt), 0) for place in (done, full))
        tokens = [*prompt[done * size : full * size], *output[start:end]]
        parent = keys[-1] if done else b""
        images, at = attempt.images, done * size
        new = block_keys(attempt.cache_namespace, tokens, size, parent=parent, images=images, start=at)
        if self.journal is not None:
            self.journal.expect(new, tokens, attempt, parent)
        for key in new:
            self._pool.insert(block_ids[len(keys)], key, parent)
            keys.append(key)
            parent = key
        return keys

    def distrust(self, attempt: Attempt, roots: Iterable[bytes] = ()) -> None:
        """Forget the attempt's blocks, which a failed step read, and all blocks that continue them.

        `roots` are first keys that came with the output: a short prompt fills no block.
        """
        first = attempt.token_ids[: self._block_size]
        keys = block_keys(attempt.cache_namespace, first, self._block_size, images=attempt.images)
        self._pool.forget([*keys, *roots])

    def report_changes(self) -> None:
        """Report the keys that changed since the last report."""
        added, removed = self._pool.drain_events()
        if added or removed:
            self._changed(added, removed)
