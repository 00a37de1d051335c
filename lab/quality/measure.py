"""Runs windows of text through the engine in several precisions at once, chunk by chunk beside fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.own_tables import own_blocks
from diptych.engine.loaded_model import Model
from diptych.engine.prompt_logprobs import prompt_logits
from diptych.engine.runner import Runner
from lab.quality.divergence import NOTHING, Sums, compare

REFERENCE = "fp32"
BLOCK_SIZE = 16


class Reader:
    """Model with room for one window: the prefill path of a worker, in its paged blocks."""

    def __init__(self, model: Model, window: int, threads: int) -> None:
        layout = model.kv_layout(BLOCK_SIZE)
        self._runner = Runner(model, threads)
        self._memory = KVMemory(layout, own_blocks(layout, window))
        # Backwards: a window that lay in its blocks in order would not show a wrong block table.
        self._table = list(reversed(range(self._memory.num_blocks)))

    def logits(self, token_ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Chunks of logits after each token."""
        return prompt_logits(self._runner, self._memory, self._table, token_ids)


def measure(
    models: Mapping[str, Model],
    windows: Sequence[Sequence[int]],
    threads: int,
    on_window: Callable[[], None] = lambda: None,
) -> dict[str, list[Sums]]:
    """Sums of each window for every model; `models` has fp32 among them. `on_window` follows progress."""
    longest = max(map(len, windows))
    readers = {name: Reader(model, longest, threads) for name, model in models.items()}
    sums: dict[str, list[Sums]] = {name: [] for name in models}
    for window in windows:
        for name, found in _one_window(readers, window).items():
            sums[name].append(found)
        on_window()
    return sums


def _one_window(readers: Mapping[str, Reader], window: Sequence[int]) -> dict[str, Sums]:
    totals = dict.fromkeys(readers, NOTHING)
    streams = [reader.logits(window) for reader in readers.values()]
    for parts in zip(*streams, strict=True):
        logits = dict(zip(readers, (one for _, one in parts), strict=True))
        start = parts[0][0]
        targets = window[start + 1 : start + 1 + len(logits[REFERENCE])]
        for name, candidate in logits.items():
            totals[name] += compare(logits[REFERENCE], candidate, targets)
    return totals
