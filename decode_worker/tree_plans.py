"""The plans of trees that --speculative-tree stands for. Pure."""

from __future__ import annotations

from decode_worker.draft_tree import parse_branches
from decode_worker.dynamic_trees import DYNAMIC, DynamicTrees
from decode_worker.fixed_trees import FixedTrees
from decode_worker.tree_plan import TreePlan


def parse_plan(text: str) -> TreePlan | None:
    """Return the trees of `4,2,1` or `dynamic:20,5,4`; None for an empty text. Raises BadTree."""
    if not text:
        return None
    if text.startswith(DYNAMIC):
        return DynamicTrees.parse(text)
    return FixedTrees(parse_branches(text))
