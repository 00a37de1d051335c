"""Ends of a forward pass in parts: embeddings from the ranks that hold them, logits to rank 0.

Shapes depend on the number of tokens alone, so that a step with both can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.backends.triton.layer_halves import LayerHalves
from diptych.engine.backends.triton.layers import embedding_scale, finished_logits
from diptych.engine.backends.triton.parts_activations import PartsActivations
from diptych.engine.batch import put_rows
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.parts import Part, parts_of_rank
from diptych.engine.parallel.pipeline import Links, receive, send
from diptych.engine.parallel.stages import Stage
from diptych.engine.parallel.vocab_shares import VocabShares


class PartsEnds:
    """Embedding and output matrix of a model, whose vocabulary is dealt to the parts."""

    def __init__(
        self,
        shape: ModelShape,
        parts: Sequence[Part],
        halves: Sequence[LayerHalves],
        links: Links,
        stage: Stage,
    ) -> None:
        """Take all parts of the model, and the halves of those that are this rank's."""
        self._shape, self._halves, self._links, self._stage = shape, halves, links, stage
        ranks, weights = links.ranks, halves[0].weights
        own = parts_of_rank(len(parts), ranks.rank, ranks.ranks)
        self._own = [parts[number].vocab for number in own]
        self._vocab = VocabShares(parts, ranks, weights.device)
        self._scale = embedding_scale(shape, weights.dtype)

    def enter(
        self,
        tokens: torch.Tensor,
        buffers: PartsActivations,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Write what enters the stage's first layer into the residual: embeddings of `tokens [T]` and in the
        `given` places rows of images (`rows_of_stage`), or the rows of the stage before. Raises GroupBroken.
        """
        residual = buffers.residual
        if self._links.before is not None:
            residual.copy_(receive(self._links.before, torch.zeros_like(residual)))
            return
        own_TH = torch.zeros_like(residual)
        for vocab, half in zip(self._own, self._halves, strict=True):
            here = (tokens >= vocab.start) & (tokens < vocab.stop)
            found = half.weights.embed[(tokens - vocab.start).clamp(0, len(vocab) - 1)]
            own_TH = torch.where(here[:, None], found, own_TH)
        residual.copy_(self._vocab.gather_embedded(tokens, own_TH))
        if self._scale != 1.0:
            residual.mul_(self._scale)
        put_rows(residual, given)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return float32 logits `[rows, vocab]` of rows of `hidden` on the process that leads, None on the
        others. Raises GroupBroken.
        """
        logits = self._of_stage(hidden) if self._stage.is_last else None
        if (home := self._links.home) is None:
            return logits
        if logits is not None:
            send(home, logits)
            return None
        like = torch.zeros((len(hidden), self._shape.vocab_size), device=hidden.device)
        return receive(home, like)

    def _of_stage(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of all ranks' vocabulary on the stage's first rank."""
        every = [
            self._of_part(half, vocab, hidden) for half, vocab in zip(self._halves, self._own, strict=True)
        ]
        return self._vocab.gather_logits(every[0] if len(every) == 1 else torch.cat(every, dim=1))

    def _of_part(self, half: LayerHalves, vocab: range, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(hidden), len(vocab)), dtype=torch.float32, device=hidden.device)
        return finished_logits(self._shape, half.products.head(hidden, out=out))
