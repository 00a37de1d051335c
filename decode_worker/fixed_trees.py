"""Trees of drafts with the same branches everywhere, whatever the drafter says of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode_worker.draft_tree import DraftTree, Path, count_children, path_depths, rank_paths
from decode_worker.tree_plan import Child, TreeGrowth, tree_of


class FixedTrees:
    """A `TreePlan`: trees with the same branches everywhere."""

    scored = False

    def __init__(self, branches: Sequence[int]) -> None:
        """Have so many `branches` at each depth."""
        self._paths = rank_paths(branches)
        self.depths = path_depths(self._paths)

    def begin(self, count: int) -> TreeGrowth:
        """See `TreePlan.begin`."""
        return _FixedGrowth(self._paths[: max(count, 0)])


class _FixedGrowth:
    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._branches = count_children(paths)
        self._tokens: dict[Path, int] = {}
        self.open: list[Path] = [()] if paths else []
        self.inner: list[Path] = []

    def token_of(self, path: Path) -> int:
        return self._tokens[path]

    def branches(self, path: Path) -> int:
        return self._branches[path]

    def grow(self, children: Mapping[Path, Sequence[Child]]) -> None:
        found = {(*parent, child.rank): child.token_id for parent, some in children.items() for child in some}
        self._tokens |= found
        self.open = [path for path in found if path in self._branches]
        self.inner += self.open

    def tree(self) -> DraftTree:
        return tree_of([path for path in self._paths if path in self._tokens], self._tokens)
