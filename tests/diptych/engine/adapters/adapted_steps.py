"""Steps of rows with adapters over one backend, in chunks, beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.engine.adapters.reader import read_adapter
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import ModelShape

BLOCK = 16


class AdaptedSteps:
    """Texts computed by a backend with the adapters that were placed in it."""

    def __init__(self, backend: Any, shape: ModelShape, dtype: torch.dtype, folders: Sequence[Path]) -> None:
        """Place the adapter of each folder in the slot of its number."""
        self._backend, self._shape = backend, shape
        self._layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK, dtype)
        assert backend.allow_adapters(max(1, len(folders)), 64) is None
        for slot, folder in enumerate(folders):
            backend.set_adapter(slot, backend.prepare_adapter(read_adapter(folder, shape, 64)))

    def logits(
        self, texts: Sequence[Sequence[int]], slots: Sequence[int | None], chunk: int
    ) -> list[torch.Tensor]:
        """Return the logits after each token of each text, `[tokens, vocab]`; all texts step together."""
        blocks = -(-max(map(len, texts)) // BLOCK)
        memory = KVMemory(self._layout, blocks * len(texts))
        memory.data.fill_(torch.nan)
        rows: list[list[torch.Tensor]] = [[] for _ in texts]
        for start in range(0, max(map(len, texts)), chunk):
            steps, owners = [], []
            for number, text in enumerate(texts):
                part = list(text[start : start + chunk])
                if part:
                    table = range(number * blocks, (number + 1) * blocks)
                    steps.append(
                        SequenceStep(
                            memory, table, start, part, True, trailing=len(part), adapter=slots[number]
                        )
                    )
                    owners.append((number, len(part)))
            logits = self._backend.forward(steps, None)
            for (number, _), of_row in zip(owners, logits.split([count for _, count in owners]), strict=True):
                rows[number].append(of_row.clone())
        return [torch.cat(of_text) for of_text in rows]

    def greedy(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int | None], count: int
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Return the greedy tokens after each prompt, and the logits that each was picked from."""
        blocks = -(-(max(map(len, prompts)) + count) // BLOCK)
        memory = KVMemory(self._layout, blocks * len(prompts))
        memory.data.fill_(torch.nan)
        texts, rows = [list(prompt) for prompt in prompts], list[torch.Tensor]()
        done = [0] * len(texts)
        for _ in range(count):
            steps = [
                SequenceStep(
                    memory,
                    range(n * blocks, (n + 1) * blocks),
                    done[n],
                    text[done[n] :],
                    True,
                    adapter=slots[n],
                )
                for n, text in enumerate(texts)
            ]
            logits = self._backend.forward(steps, None)
            rows.append(logits.clone())
            for n, token in enumerate(logits.argmax(dim=-1).tolist()):
                done[n] = len(texts[n])
                texts[n].append(token)
        output = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
        return output, list(torch.stack(rows).unbind(1))
