"""Trees of drafted tokens: several continuations that one step computes, of which at most one is right.

A tree has the most likely tokens at each place instead of one (SpecInfer, Miao et al., 2024,
arXiv:2305.09781; Medusa, Cai et al., 2024, arXiv:2401.10774). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from diptych.engine.token_tree import depths

MOST_NODES = 63
"""Tokens of the largest tree."""

Path = tuple[int, ...]
"""Ranks on the way from the last token of a sequence to a node; that token itself is (). Rank 0 is the
likeliest token after its parent.
"""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafted tokens of which each follows the last token of the sequence or another drafted one."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """Place of the token that each follows, before its own; -1: the last token of the sequence."""

    def __len__(self) -> int:
        return len(self.tokens)


Draft = Sequence[int] | DraftTree
"""Drafted tokens; in a sequence each follows the one before."""


class BadTree(ValueError):
    """Numbers that make no tree of drafts."""


def as_tree(draft: Draft) -> DraftTree:
    """Return a draft as a tree."""
    return draft if isinstance(draft, DraftTree) else DraftTree(draft, range(-1, len(draft) - 1))


def parse_branches(text: str) -> tuple[int, ...]:
    """Return the branches at each depth that `4,2,1` stands for. Raises BadTree."""
    try:
        branches = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BadTree(f"{text}: a tree is its branches at each depth, as in 4,2,1") from error
    if min(branches) < 1:
        raise BadTree(f"{text}: each depth has at least one branch")
    if (nodes := count_nodes(branches)) > MOST_NODES:
        raise BadTree(f"{text}: a tree of {nodes} tokens, of which at most {MOST_NODES} are computed at once")
    return branches


def count_nodes(branches: Sequence[int]) -> int:
    """Return the tokens of a whole tree."""
    nodes, level = 0, 1
    for branch in branches:
        level *= branch
        nodes += level
        if nodes > MOST_NODES:
            break
    return nodes


def rank_paths(branches: Sequence[int]) -> list[Path]:
    """Return the nodes of a tree as paths of ranks.

    The most promising come first, a parent before its children: so the first ones of any number are a tree.
    Promise falls with each rank on the way, and with the depth.
    """
    paths = [path for depth in range(1, len(branches) + 1) for path in product(*map(range, branches[:depth]))]
    return sorted(paths, key=lambda path: (sum(path) + len(path), len(path), path))


def path_depths(paths: Sequence[Path]) -> list[int]:
    """Return the depth, from 1 on, of the deepest of the first nodes: of one of them, of two, and so on."""
    return list(accumulate(map(len, paths), max))


def count_children(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the number of children of each node that has any."""
    counts: dict[Path, int] = {}
    for path in paths:
        counts[path[:-1]] = max(counts.get(path[:-1], 0), path[-1] + 1)
    return counts


def tree_depth(tree: DraftTree) -> int:
    """Return how many tokens of a tree may be right at once."""
    return 1 + max(depths(tree.parents), default=-1)


def right_tokens(tree: DraftTree, output: Sequence[int]) -> int:
    """Return how many tokens of a tree are right, where `output` came after the last token."""
    at, right = -1, 0
    for said in output:
        pairs = enumerate(zip(tree.tokens, tree.parents, strict=True))
        at = next((place for place, pair in pairs if pair == (said, at)), -2)
        if at == -2:
            break
        right += 1
    return right
