"""A drafter of trees by a head over features: as eagle_draft.py, with several tokens after each.

The tree grows by its depth. At each depth the head computes all nodes that there are, each with its
ancestors alone, in the lanes behind the sequence's last token; they are few. A node's feature is what its
parent gave. EAGLE-2 chooses the branches by their likelihood; here they are those of --speculative-tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode_worker.draft_tree import Draft, DraftTree, Path, count_children, path_depths, rank_paths
from decode_worker.draft_walk import DraftWalk
from decode_worker.eagle_draft import EagleDraft, catch_up
from decode_worker.growing_draft import grow
from decode_worker.likely_children import likely_children
from decode_worker.sequence import DecodeSequence
from diptych.engine.heads.feature_head import FeatureHead, HeadStep
from diptych.engine.kv.kv_memory import KVMemory


class EagleTree:
    """A `Drafter`."""

    def __init__(self, head: FeatureHead, memory: KVMemory, branches: Sequence[int]) -> None:
        """Draft trees of so many `branches` at each depth. Raises ValueError as `EagleDraft` does."""
        self._chains = EagleDraft(head, memory)
        self._head, self._memory = head, self._chains.memory
        self._paths = rank_paths(branches)
        self.depths = path_depths(self._paths)

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`."""
        return self._chains.rests(sequence)

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Draft]:
        """See `Drafter.draft`."""
        trees = [
            _Tree(one, self._paths[: max(count, 0)]) for one, count in zip(sequences, counts, strict=True)
        ]
        going = [one for one in trees if one.paths and one.sequence.features and not self.rests(one.sequence)]
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
            one.branch(of_tree)


class _Tree:
    """The tree of one sequence."""

    def __init__(self, sequence: DecodeSequence, paths: Sequence[Path]) -> None:
        self.sequence = sequence
        self.paths = paths
        self._branches = count_children(paths)
        self._walks: dict[Path, DraftWalk] = {(): DraftWalk(sequence)}
        self._tokens: dict[Path, int] = {}  # by depth: so they lie in lanes
        self._features: dict[Path, torch.Tensor] = {}
        self._open: list[Path] = [()]  # nodes whose children come next

    def goes_on(self, max_context: int) -> bool:
        """See `Growing.goes_on`."""
        return bool(self._open) and self.sequence.num_tokens + len(self._open[0]) < max_context

    def step(self, head: FeatureHead) -> HeadStep:
        """Return the step over what the sequence has got, at first, and over all nodes later."""
        if not self._features:
            return catch_up(self.sequence, head)
        places = {path: place for place, path in enumerate(self._tokens)}
        return HeadStep(
            self.sequence.block_ids,
            self.sequence.num_tokens,
            list(self._tokens.values()),
            torch.stack([self._features[path[:-1]] for path in self._tokens]),
            [places.get(path[:-1], -1) for path in self._tokens],
        )

    def take(self, given: torch.Tensor) -> torch.Tensor:
        """Take the features of a step; return those of the nodes whose children come next."""
        if not self._features:
            self.sequence.draft_computed = self.sequence.num_tokens
            self.sequence.features.clear()
            self._features[()] = given[-1]
        else:
            self._features |= dict(zip(self._tokens, given, strict=True))
        return torch.stack([self._features[path] for path in self._open])

    def branch(self, logits: torch.Tensor) -> None:
        """Draw the children of the open nodes, which have `logits [nodes, vocab]`."""
        opened: list[Path] = []
        for path, row in zip(self._open, logits, strict=True):
            walk = self._walks[path]
            for rank, token_id in enumerate(likely_children(row[None], walk.row, self._branches[path])):
                child = (*path, rank)
                if child not in self.paths or (follows := walk.followed(token_id)) is None:
                    continue
                self._tokens[child], self._walks[child] = token_id, follows
                if child in self._branches:
                    opened.append(child)
        self._open = opened

    def tree(self) -> DraftTree:
        """Return what was drawn, the most promising nodes first."""
        drawn = [path for path in self.paths if path in self._tokens]
        places = {path: place for place, path in enumerate(drawn)}
        return DraftTree(
            [self._tokens[path] for path in drawn], [places.get(path[:-1], -1) for path in drawn]
        )
