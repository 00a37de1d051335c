"""Trees of drafts that go where the drafter is sure (EAGLE-2, Li et al., 2024, arXiv:2406.16858). Pure.

The value of a node is the product of probabilities on the way to it, as the drafter has them: about how often
the model says all of it. At each depth the nodes of the highest values get children (section 4.1 there); of
all that were drawn those of the highest values are verified (section 4.2). A node has no higher value than
its parent, so that these are a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from decode_worker.draft_tree import MOST_NODES, BadTree, DraftTree, Path
from decode_worker.tree_plan import Child, TreeGrowth, tree_of

DYNAMIC = "dynamic:"
DEPTH, MOST_WIDTH = 5, 8
"""Depth, and most width, where they are not given."""


class DynamicTrees:
    """A `TreePlan`."""

    scored = True

    def __init__(self, nodes: int, depth: int, width: int) -> None:
        """Verify the best `nodes` of all that are drawn when at each of `depth` depths the best `width` nodes
        get up to `width` children each. Raises BadTree.
        """
        named = f"{DYNAMIC}{nodes},{depth},{width}"
        if min(nodes, depth, width) < 1:
            raise BadTree(f"{named}: nodes, depth and width are at least one")
        if nodes > MOST_NODES:
            raise BadTree(f"{named}: of a tree at most {MOST_NODES} tokens are computed at once")
        if depth > nodes:
            raise BadTree(f"{named}: {nodes} tokens are no deeper than that")
        self._depth, self._width = depth, width
        self.depths: Sequence[int] = [min(count, depth) for count in range(1, nodes + 1)]

    @classmethod
    def parse(cls, text: str) -> DynamicTrees:
        """Return the trees of `dynamic:NODES`, or `dynamic:NODES,DEPTH,WIDTH`. Raises BadTree."""
        try:
            nodes, *given = (int(part) for part in text.removeprefix(DYNAMIC).split(","))
            if not given:
                depth = min(DEPTH, max(nodes, 1))
                given = [depth, max(1, min(MOST_WIDTH, nodes // max(depth - 1, 1)))]
            depth, width = given
        except ValueError as error:
            raise BadTree(f"{text}: a dynamic tree is dynamic:NODES or dynamic:NODES,DEPTH,WIDTH") from error
        return cls(nodes, depth, width)

    def begin(self, count: int) -> TreeGrowth:
        """See `TreePlan.begin`."""
        return _DynamicGrowth(min(count, len(self.depths)), self._depth, self._width)


class _DynamicGrowth:
    def __init__(self, count: int, depth: int, width: int) -> None:
        self._count, self._depth, self._width = count, min(depth, count), width
        self._tokens: dict[Path, int] = {}
        self._values: dict[Path, float] = {(): 0.0}
        """Logarithms of the values."""
        self.open: list[Path] = [()] if count > 0 else []
        self.inner: list[Path] = []

    def token_of(self, path: Path) -> int:
        return self._tokens[path]

    def branches(self, path: Path) -> int:
        return min(self._width, self._count)

    def grow(self, children: Mapping[Path, Sequence[Child]]) -> None:
        for parent, some in children.items():
            for child in some:
                path = (*parent, child.rank)
                self._tokens[path] = child.token_id
                self._values[path] = self._values[parent] + min(child.logprob, 0.0)
        depth = len(self.open[0]) + 1
        if depth == self._depth:
            self.open = []
            return
        # Below a node that is not among the best by now, none will be: it needs no children, nor a lane.
        best = self._best()
        self.open = [path for path in best if len(path) == depth][: self._width]
        kept = set(best)
        self.inner = [path for path in self.inner if path in kept] + self.open

    def tree(self) -> DraftTree:
        return tree_of(self._best(), self._tokens)

    def _best(self) -> list[Path]:
        """Return the nodes of the highest values, as many as the tree may have; of equals the upper first."""
        return heapq.nsmallest(
            self._count, self._tokens, key=lambda path: (-self._values[path], len(path), path)
        )
