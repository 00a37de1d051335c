"""A drafter of Medusa heads: it reads the hidden row that the last token was sampled from.

A head's guess is drawn by the request's own seed, counter and rules, as the model's token will be: where the
two distributions agree, so do the draws. In a tree the further branches are the next likeliest tokens. The
first step after a prompt has no drafts: no step of this worker has given its hidden row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakSet

import torch

from decode_worker.draft_tree import Draft, DraftTree, Path
from decode_worker.fixed_trees import FixedTrees
from decode_worker.growing_tree import Drawn, GrowingTree
from decode_worker.sequence import DecodeSequence
from decode_worker.tree_plan import TreePlan
from diptych.engine.heads.medusa import MedusaHeads
from diptych.engine.sampling import SampleRow

_log = logging.getLogger(__name__)

NO_DRAFT = DraftTree((), ())


class MedusaDraft:
    """A `Drafter`."""

    def __init__(self, heads: MedusaHeads, plan: TreePlan | None = None) -> None:
        """Draft the trees of `plan`; without one chains of a token for each head.

        Raises ValueError for trees that are deeper than there are heads.
        """
        self._heads = heads
        self._plan = plan or FixedTrees((1,) * len(heads))
        self.depths = self._plan.depths
        if self.depths[-1] > len(heads):
            raise ValueError(f"a tree of depth {self.depths[-1]} over {len(heads)} heads")
        self._given_up: WeakSet[DecodeSequence] = WeakSet()

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`: only after a failure there are no more drafts."""
        return sequence in self._given_up

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Draft]:
        """See `Drafter.draft`."""
        drafts: list[Draft] = [NO_DRAFT] * len(sequences)
        asked = [
            (number, one.hidden[one.hidden_row])
            for number, (one, count) in enumerate(zip(sequences, counts, strict=True))
            if count > 0 and one.hidden is not None and not self.rests(one)
        ]
        if not asked:
            return drafts
        try:
            depth = max(self.depths[min(counts[number], len(self.depths)) - 1] for number, _ in asked)
            logits = self._heads.logits(torch.stack([row for _, row in asked]), depth)
            for place, (number, _) in enumerate(asked):
                tree = _Tree(sequences[number], self._plan, counts[number])
                drafts[number] = tree.grown(logits[:, place])
        except Exception:
            _log.exception("Medusa heads failed for %d sequences, which get no more drafts", len(asked))
            self._given_up.update(sequences[number] for number, _ in asked)
            return [NO_DRAFT] * len(sequences)
        return drafts


class _Tree(GrowingTree):
    """The tree of one sequence."""

    def grown(self, logits: torch.Tensor) -> DraftTree:
        """Return the tree by the heads' logits `[depth, vocab]`."""
        known: dict[tuple[int, int], Drawn] = {}  # by depth and number: without rules they are any parent's

        def draw(path: Path, row: SampleRow, count: int) -> Drawn:
            key = (len(path), count)
            if not row.ruled and key in known:
                return known[key]
            drawn = self.draw(logits[len(path) : len(path) + 1], row, count)
            if not row.ruled:
                known[key] = drawn
            return drawn

        while self.open:
            self.branch(draw)
        return self.tree()
