"""The interface of heads that read a model's features and draft token after token (EAGLE, MTP layers).

A head reads, for each token, its embedding beside a feature of the token before: at first the model's, later
what the head itself gave. Its keys and values lie in a second segment of the model's blocks, those of token
i + 1 with the feature of token i in lane i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import ModelShape


@dataclass(frozen=True)
class HeadStep:
    """A sequence's share of a step of a head: tokens in lanes `start, start + 1, ...`."""

    block_table: Sequence[int]
    start: int
    token_ids: Sequence[int]
    features: torch.Tensor
    """`[tokens, hidden]`: of the token before each."""
    parents: Sequence[int] | None = None
    """Parents of tokens in a tree, as in `SequenceStep`; None: they are a chain."""

    def share(self, memory: KVMemory) -> SequenceStep:
        """Return the same as a step of a model of one layer over `memory`."""
        return SequenceStep(
            memory, self.block_table, self.start, self.token_ids, wants_logits=False, parents=self.parents
        )


class FeatureHead(Protocol):
    """A head that goes on from features."""

    @property
    def shape(self) -> ModelShape:
        """Shape of its layer, as a model of one."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """Layers of the model before which the residual stream is a feature; behind the last one's number
        stands the stream behind the final norm.
        """
        ...

    def kv_layout(self, block_size: int) -> KVLayout:
        """Return the layout of its segment of blocks."""
        ...

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, hidden]`, which the layer reads of the model's features `[tokens, taps * H]`."""
        ...

    def step(self, memory: KVMemory, steps: Sequence[HeadStep]) -> torch.Tensor:
        """Compute tokens and write their keys and values to `memory`, the segments of the head.

        Returns the features `[tokens, hidden]` that they give, those of all sequences in a row.
        """
        ...

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[rows, vocab]` on the CPU after features that the head gave."""
        ...
