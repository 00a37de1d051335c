"""Changes of the prefix cache as KV events: what the pool reports by key, with the tokens of each block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from decode_worker.kv_events.events import POOL, TIER, BlockTokens, removed, stored
from decode_worker.kv_events.msgpack import Value
from diptych.worker_process.attempt import Attempt

MOST_EXPECTED = 1 << 16
"""Blocks that were announced and did not enter the cache; older ones are dropped."""


class Journal:
    """Makes events of changes; `publish` gets those that belong together."""

    def __init__(self, publish: Callable[[list[Value]], None], block_size: int) -> None:
        self._publish = publish
        self._block_size = block_size
        self._expected: OrderedDict[bytes, BlockTokens] = OrderedDict()
        self._in_pool: dict[bytes, BlockTokens] = {}
        self._in_tiers: set[bytes] = set()

    def expect(
        self, keys: Sequence[bytes], token_ids: Sequence[int], attempt: Attempt, parent: bytes = b""
    ) -> None:
        """Note the tokens of blocks that may enter the cache soon: those of `keys`, which follow `parent`.

        Blocks of attempts with images are left out: token ids alone do not tell images apart.
        """
        if attempt.images:
            return
        size = self._block_size
        for place, key in enumerate(keys):
            if key not in self._in_pool:
                tokens = tuple(token_ids[place * size : (place + 1) * size])
                self._expected[key] = BlockTokens(parent, tokens, attempt.adapter)
                self._expected.move_to_end(key)
            parent = key
        while len(self._expected) > MOST_EXPECTED:
            self._expected.popitem(last=False)

    def changed(self, added: Iterable[bytes], gone: Iterable[bytes], tiered: Sequence[bytes] = ()) -> None:
        """Publish which keys entered the cache and left it; `tiered` are those of the latter in tiers."""
        events: list[Value] = []
        left = {key: block for key in gone if (block := self._in_pool.pop(key, None)) is not None}
        if left:
            events.append(removed(list(left), POOL))
        lower = [key for key in tiered if key in left]
        self._in_tiers.update(lower)
        events += _runs([(key, left[key]) for key in lower], TIER)
        came = [(key, block) for key in added if (block := self._expected.pop(key, None)) is not None]
        self._in_pool.update(came)
        if back := [key for key, _ in came if key in self._in_tiers]:
            self._in_tiers.difference_update(back)
            events.append(removed(back, TIER))
        events += _runs(came, POOL)
        if events:
            self._publish(events)

    def left_tiers(self, keys: Iterable[bytes]) -> None:
        """Publish which keys are in no tier any more."""
        if gone := [key for key in keys if key in self._in_tiers]:
            self._in_tiers.difference_update(gone)
            self._publish([removed(gone, TIER)])


def _runs(blocks: Iterable[tuple[bytes, BlockTokens]], medium: str) -> list[Value]:
    """Return the events of blocks, one for each run of blocks that follow one another."""
    runs: list[list[tuple[bytes, BlockTokens]]] = []
    for key, block in blocks:
        if runs and block.parent == runs[-1][-1][0]:
            runs[-1].append((key, block))
        else:
            runs.append([(key, block)])
    return [stored([key for key, _ in run], [block for _, block in run], medium) for run in runs]
