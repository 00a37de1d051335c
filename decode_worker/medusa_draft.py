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

from decode_worker.draft_tree import Draft, DraftTree, Path, count_children, path_depths, rank_paths
from decode_worker.draft_walk import DraftWalk
from decode_worker.likely_children import likely_children
from decode_worker.sequence import DecodeSequence
from diptych.engine.heads.medusa import MedusaHeads

_log = logging.getLogger(__name__)

NO_DRAFT = DraftTree((), ())


class MedusaDraft:
    """A `Drafter`."""

    def __init__(self, heads: MedusaHeads, branches: Sequence[int] = ()) -> None:
        """Draft trees of so many `branches` at each depth; without them chains of a token for each head.

        Raises ValueError for a tree that is deeper than there are heads.
        """
        if len(branches) > len(heads):
            raise ValueError(f"a tree of depth {len(branches)} over {len(heads)} heads")
        self._heads = heads
        self._paths = rank_paths(branches or (1,) * len(heads))
        self.depths = path_depths(self._paths)
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
            depth = max(self.depths[min(counts[number], len(self._paths)) - 1] for number, _ in asked)
            logits = self._heads.logits(torch.stack([row for _, row in asked]), depth)
            for place, (number, _) in enumerate(asked):
                growing = _Growing(sequences[number], logits[:, place])
                drafts[number] = growing.grow(self._paths[: counts[number]])
        except Exception:
            _log.exception("Medusa heads failed for %d sequences, which get no more drafts", len(asked))
            self._given_up.update(sequences[number] for number, _ in asked)
            return [NO_DRAFT] * len(sequences)
        return drafts


class _Growing:
    """The tree of one sequence, grown from heads' logits `[depth, vocab]`."""

    def __init__(self, sequence: DecodeSequence, logits: torch.Tensor) -> None:
        self._logits = logits
        self._walks: dict[Path, DraftWalk] = {(): DraftWalk(sequence)}
        self._unruled: dict[tuple[int, int], Sequence[int]] = {}  # by depth and number: they are any parent's

    def grow(self, paths: Sequence[Path]) -> DraftTree:
        """Return the nodes that are `paths` of ranks, without those that the rules leave no place."""
        tokens, parents = list[int](), list[int]()
        places: dict[Path, int] = {(): -1}
        branches = count_children(paths)
        for path in paths:
            parent = path[:-1]
            if parent not in self._walks:
                continue
            found = self._children(parent, branches[parent])
            if path[-1] >= len(found):
                continue
            token_id = found[path[-1]]
            if (walk := self._walks[parent].followed(token_id)) is None:
                continue
            self._walks[path], places[path] = walk, len(tokens)
            tokens.append(token_id)
            parents.append(places[parent])
        return DraftTree(tokens, parents)

    def _children(self, parent: Path, count: int) -> Sequence[int]:
        """Return up to `count` tokens after a node: the one that is drawn, then the likeliest others."""
        row, depth = self._walks[parent].row, len(parent)
        key = (depth, count)
        if not row.ruled and key in self._unruled:
            return self._unruled[key]
        found = likely_children(self._logits[depth : depth + 1], row, count)
        if not row.ruled:
            self._unruled[key] = found
        return found
