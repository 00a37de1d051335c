"""The tree of drafts after one sequence while it grows: its plan, and the rules of the request at a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from decode_worker.draft_tree import DraftTree, Path
from decode_worker.draft_walk import DraftWalk
from decode_worker.likely_children import likely_children, scored_children
from decode_worker.sequence import DecodeSequence
from decode_worker.tree_plan import Child, TreePlan
from diptych.engine.sampling import SampleRow

Drawn = Sequence[tuple[int, float]]
"""Tokens with log-probabilities."""


class GrowingTree:
    """A tree of at most `count` nodes after a sequence."""

    def __init__(self, sequence: DecodeSequence, plan: TreePlan, count: int) -> None:
        self.growth = plan.begin(count)
        self._scored = plan.scored
        self._walks: dict[Path, DraftWalk] = {(): DraftWalk(sequence)}

    @property
    def open(self) -> Sequence[Path]:
        """Nodes whose children come next."""
        return self.growth.open

    def branch(self, draw: Callable[[Path, SampleRow, int], Drawn]) -> None:
        """Grow by a depth; `draw` returns up to so many tokens after a node, sampled as the row says."""
        self.growth.grow({path: self._children(path, draw) for path in self.growth.open})

    def draw(self, logits: torch.Tensor, row: SampleRow, count: int) -> Drawn:
        """Return up to `count` tokens after a node with `logits [1, vocab]`, scored where that is wanted."""
        if self._scored:
            return scored_children(logits, row, count)
        return [(token_id, 0.0) for token_id in likely_children(logits, row, count)]

    def tree(self) -> DraftTree:
        """Return what was drawn, the most promising nodes first."""
        return self.growth.tree()

    def _children(self, path: Path, draw: Callable[[Path, SampleRow, int], Drawn]) -> Sequence[Child]:
        """Return the drawn tokens that the rules let come after a node."""
        walk, children = self._walks[path], list[Child]()
        for rank, (token_id, logprob) in enumerate(draw(path, walk.row, self.growth.branches(path))):
            if (follows := walk.followed(token_id)) is not None:
                self._walks[*path, rank] = follows
                children.append(Child(rank, token_id, logprob))
        return children
