"""A drafter of trees by a head over features: as eagle_draft.py, with several tokens after each.

The tree grows by its depth. At each depth the head computes the nodes that have children, each with its
ancestors alone, in the lanes behind the sequence's last token; they are few. A node's feature is what its
parent gave. Which nodes get children the plan says (`decode_worker.tree_plan.TreePlan`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode_worker.draft_tree import Draft, Path
from decode_worker.eagle_draft import EagleDraft, catch_up
from decode_worker.growing_draft import grow
from decode_worker.growing_tree import GrowingTree
from decode_worker.sequence import DecodeSequence
from decode_worker.tree_plan import TreePlan
from diptych.engine.heads.feature_head import FeatureHead, HeadStep
from diptych.engine.kv.kv_memory import KVMemory


class EagleTree:
    """A `Drafter`."""

    def __init__(self, head: FeatureHead, memory: KVMemory, plan: TreePlan) -> None:
        """Draft the trees of `plan`. Raises ValueError as `EagleDraft` does."""
        self._chains = EagleDraft(head, memory)
        self._head, self._memory = head, self._chains.memory
        self._plan = plan
        self.depths = plan.depths

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`."""
        return self._chains.rests(sequence)

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Draft]:
        """See `Drafter.draft`."""
        trees = [_Tree(one, self._plan, count) for one, count in zip(sequences, counts, strict=True)]
        going = [one for one in trees if one.open and one.sequence.features and not self.rests(one.sequence)]
        grow(going, self._extend, self._head.shape.max_context, "the drafting head")
        return [one.tree() for one in trees]

    def _extend(self, trees: Sequence[_Tree]) -> None:
        """Compute what there is of all trees, and draw the nodes of the next depth."""
        steps = [one.step(self._head) for one in trees]
        features = self._head.step(self._memory, steps)
        given = features.split([len(step.token_ids) for step in steps])
        open_rows = [one.take(part) for one, part in zip(trees, given, strict=True)]
        logits = self._head.logits(torch.cat(open_rows)).split([len(rows) for rows in open_rows])
        for one, of_tree in zip(trees, logits, strict=True):
            one.extend(of_tree)


class _Tree(GrowingTree):
    """The tree of one sequence."""

    def __init__(self, sequence: DecodeSequence, plan: TreePlan, count: int) -> None:
        super().__init__(sequence, plan, count)
        self.sequence = sequence
        self._features: dict[Path, torch.Tensor] = {}

    def goes_on(self, max_context: int) -> bool:
        """See `Growing.goes_on`."""
        return bool(self.open) and self.sequence.num_tokens + len(self.open[0]) < max_context

    def step(self, head: FeatureHead) -> HeadStep:
        """Return the step over what the sequence has got, at first, and over all inner nodes later."""
        if not self._features:
            return catch_up(self.sequence, head)
        inner = self.growth.inner
        places = {path: place for place, path in enumerate(inner)}
        return HeadStep(
            self.sequence.block_ids,
            self.sequence.num_tokens,
            [self.growth.token_of(path) for path in inner],
            torch.stack([self._features[path[:-1]] for path in inner]),
            [places.get(path[:-1], -1) for path in inner],
        )

    def take(self, given: torch.Tensor) -> torch.Tensor:
        """Take the features of a step; return those of the nodes whose children come next."""
        if not self._features:
            self.sequence.draft_computed = self.sequence.num_tokens
            self.sequence.features.clear()
            self._features[()] = given[-1]
        else:
            self._features |= dict(zip(self.growth.inner, given, strict=True))
        return torch.stack([self._features[path] for path in self.open])

    def extend(self, logits: torch.Tensor) -> None:
        """Draw the children of the open nodes, which have `logits [nodes, vocab]`."""
        of_node = dict(zip(self.open, logits.split(1), strict=True))
        self.branch(lambda path, row, count: self.draw(of_node[path], row, count))
