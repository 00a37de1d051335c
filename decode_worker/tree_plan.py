"""Plans of trees of drafts: what decides, while a tree grows, which nodes it has. Pure.

A tree grows by its depth. A drafter draws the children of all open nodes, and the growth opens some of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from decode_worker.draft_tree import DraftTree, Path


class Child(NamedTuple):
    """A token that may follow a node."""

    rank: int
    token_id: int
    logprob: float
    """Logarithm of its probability after its parent; 0 where the plan asks for none (`TreePlan.scored`)."""


class TreeGrowth(Protocol):
    """The tree after one sequence, while it grows."""

    @property
    def open(self) -> Sequence[Path]:
        """Nodes of one depth whose children come next; none at the end."""
        ...

    @property
    def inner(self) -> Sequence[Path]:
        """Opened nodes that may be in the tree, parents first, without the last token of the sequence."""
        ...

    def token_of(self, path: Path) -> int:
        """Return the token of a node."""
        ...

    def branches(self, path: Path) -> int:
        """Return how many children an open node may have."""
        ...

    def grow(self, children: Mapping[Path, Sequence[Child]]) -> None:
        """Take the children of all open nodes, and open nodes of the next depth."""
        ...

    def tree(self) -> DraftTree:
        """Return the tree, the most promising nodes first."""
        ...


class TreePlan(Protocol):
    """Shape of the trees of a drafter."""

    @property
    def depths(self) -> Sequence[int]:
        """Depth, at most, of a tree of one node, of two, and so on up to the most."""
        ...

    @property
    def scored(self) -> bool:
        """True if children need log-probabilities."""
        ...

    def begin(self, count: int) -> TreeGrowth:
        """Return the growth of a tree of at most `count` nodes, which has no more inner nodes at a time."""
        ...


def tree_of(paths: Sequence[Path], tokens: Mapping[Path, int]) -> DraftTree:
    """Return the tree of the nodes `paths`, parents before their children."""
    places = {path: place for place, path in enumerate(paths)}
    return DraftTree([tokens[path] for path in paths], [places.get(path[:-1], -1) for path in paths])
