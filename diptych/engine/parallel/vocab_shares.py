"""The vocabulary as it is dealt to the ranks of a stage, which exchange embeddings and logits.

Shapes depend on the number of tokens alone, so that a step with both can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.parts import Part, parts_of_rank


class VocabShares:
    """Runs of the vocabulary, one a rank."""

    def __init__(self, parts: Sequence[Part], communicator: Communicator, device: torch.device) -> None:
        """Take all parts of the model. Tokens and hidden rows are on `device`."""
        self._communicator, ranks = communicator, communicator.ranks
        dealt = [parts_of_rank(len(parts), rank, ranks) for rank in range(ranks)]
        spans = [range(parts[of[0]].vocab.start, parts[of[-1]].vocab.stop) for of in dealt]
        self._widths = [len(span) for span in spans]
        self._ends = torch.tensor([span.stop for span in spans], device=device)

    def gather_embedded(self, tokens: torch.Tensor, own_TH: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `tokens [T]`, each from the rank that has it; `own_TH` has those that are
        here. Raises GroupBroken.
        """
        every_RTH = self._communicator.all_gather(own_TH)
        holders = torch.bucketize(tokens, self._ends, right=True)
        return every_RTH[holders, torch.arange(len(tokens), device=tokens.device)]

    def gather_logits(self, own: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of all ranks' tokens, `[rows, vocab]`, on rank 0, None on the others; `own` are
        this rank's. Raises GroupBroken.
        """
        gathered = self._communicator.gather(functional.pad(own, (0, max(self._widths) - own.shape[1])))
        if gathered is None:
            return None
        return torch.cat(
            [logits[:, :width] for logits, width in zip(gathered, self._widths, strict=True)], dim=1
        )
