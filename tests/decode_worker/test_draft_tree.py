"""Trees of drafts: their flags, the order of their nodes, and what of them was right."""

from __future__ import annotations

import pytest

from decode_worker.draft_lengths import StepCosts, best_length
from decode_worker.draft_tree import (
    MOST_NODES,
    BadTree,
    DraftTree,
    as_tree,
    count_nodes,
    parse_branches,
    rank_paths,
    right_tokens,
    tree_depth,
)

TREE = DraftTree((10, 11, 20, 21, 30), (-1, -1, 0, 1, 2))


def test_branches_are_read_and_others_refused_in_words() -> None:
    assert parse_branches("4,2,1") == (4, 2, 1)
    for text, words in (("4,x", "branches at each depth"), ("4,0", "at least one"), ("8,8", "at most 63")):
        with pytest.raises(BadTree, match=words):
            parse_branches(text)
    assert count_nodes((4, 2, 1)) == 20
    assert count_nodes((9,) * 9) > MOST_NODES


@pytest.mark.parametrize("branches", [(4, 2, 1), (3, 3), (1, 1, 1, 1), (7,)], ids=str)
def test_the_first_nodes_of_any_number_are_a_tree_and_the_likeliest_chain_comes_first(
    branches: tuple[int, ...],
) -> None:
    paths = rank_paths(branches)
    assert len(set(paths)) == len(paths) == count_nodes(branches)
    for place, path in enumerate(paths):
        assert path[:-1] in {(), *paths[:place]}
    assert paths[0] == (0,)


def test_right_tokens_are_those_of_one_way_down() -> None:
    assert [right_tokens(TREE, said) for said in ((10, 20, 30, 5), (10, 21), (11, 21, 30), (12,), ())] == [
        3,
        1,
        2,
        0,
        0,
    ]
    assert (tree_depth(TREE), len(TREE)) == (3, 5)
    chain = as_tree([4, 5, 6])
    assert (list(chain.parents), tree_depth(chain), right_tokens(chain, (4, 5, 9))) == ([-1, 0, 1], 3, 2)
    assert tree_depth(as_tree(())) == 0


def test_a_tree_pays_by_its_depth_and_costs_by_its_nodes() -> None:
    costs = StepCosts()
    costs.record_step(1, 1.0, plain=True)
    costs.record_step(9, 1.8, plain=False)
    assert best_length(0.9, 8, costs, "heads", 1, [1, 2, 2, 2, 3, 3, 3, 3])[0] == 5
    assert best_length(0.1, 8, costs, "heads", 1, [1, 2, 2, 2, 3, 3, 3, 3])[0] == 0
    assert best_length(0.9, 3, costs, "heads", 1, [1, 2, 2, 2, 3])[0] == 2
