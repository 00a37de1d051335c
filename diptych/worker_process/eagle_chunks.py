"""A drafting head's keys and values of prompts, computed chunk by chunk behind the model's own.

A token goes with the model's feature of the token before. That of the last token of a chunk is kept for the
next chunk. Where it is missing, before a prompt and behind a prefix that came from the cache, it is zero.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from diptych.engine.batch import AbortWords
from diptych.engine.heads.feature_head import FeatureHead, HeadStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker_process.draft_chunks import DraftChunk

_log = logging.getLogger(__name__)


class EagleChunks:
    """Runs the head over the chunks of a step that the model has computed."""

    def __init__(self, head: FeatureHead) -> None:
        self._head = head
        self._last: WeakKeyDictionary[object, tuple[int, torch.Tensor]] = WeakKeyDictionary()
        """Computed tokens of each owner of chunks, and the feature of the last one."""

    def compute(self, chunks: Sequence[DraftChunk], abort: AbortWords | None = None) -> None:
        """See `PromptDrafts.compute`."""
        try:
            self._compute(
                [
                    chunk
                    for i, chunk in enumerate(chunks)
                    if chunk.step.memory.draft is not None and (abort is None or not abort.is_aborted(i))
                ]
            )
        except Exception:
            _log.exception("the drafting head did not compute %d chunks", len(chunks))

    def _compute(self, chunks: Sequence[DraftChunk]) -> None:
        memories: dict[int, tuple[KVMemory, list[HeadStep]]] = {}
        for chunk in chunks:
            step, features = chunk.step, chunk.features
            if features is None or step.memory.draft is None:
                raise ValueError("the step gave no features, or its blocks have no segment for a head")
            end, last = self._last.get(chunk.owner, (0, features[0]))
            before = last[None] if step.start and end == step.start else torch.zeros_like(features[:1])
            self._last[chunk.owner] = step.start + len(step.token_ids), features[-1].clone()
            read = self._head.fuse(torch.cat([before, features[:-1]]))
            if step.start + len(step.token_ids) <= self._head.shape.max_context:
                steps = memories.setdefault(id(step.memory), (step.memory.draft, []))[1]
                steps.append(HeadStep(step.block_table, step.start, step.token_ids, read))
        for memory, steps in memories.values():
            self._head.step(memory, steps)
