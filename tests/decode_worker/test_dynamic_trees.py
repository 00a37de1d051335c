"""Dynamic trees of drafts: the best nodes of what was drawn, by brute force over all that could be drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
import torch

from decode_worker.config import DecodeSettings
from decode_worker.draft_tree import BadTree, DraftTree, Path
from decode_worker.likely_children import likely_children, scored_children
from decode_worker.tree_plan import Child, TreeGrowth
from decode_worker.tree_plans import parse_plan
from diptych.engine.sampling import SampleRow, SamplingParams

CROWDED = ("dynamic:9,4,4", "dynamic:5,5,9", "dynamic:48,6,10")
"""Plans that open more nodes than the tree has; the last one is EAGLE-2's own for 70 billion numbers."""
PLANS = ("dynamic:9,4,3", "dynamic:20,5,4", "dynamic:6,3,2", "dynamic:12,12,1", "dynamic:4,1,4", *CROWDED)


class Chances:
    """Log-probabilities of the ranks after each node, of a drafter that is sure at some nodes and not at
    others; the token of a node is its rank.
    """

    def __init__(self, seed: int, width: int) -> None:
        self._seed, self._width = seed, width
        self.after = cache(self._after)

    def _after(self, path: Path) -> list[Child]:
        rng = random.Random(str((self._seed, path)))
        weights = sorted((rng.random() ** rng.choice([1, 12]) for _ in range(self._width + 3)), reverse=True)
        return [
            Child(rank, rank, math.log(weight / sum(weights)))
            for rank, weight in enumerate(weights[: self._width])
        ]

    def value(self, path: Path) -> float:
        return sum(self.after(path[:place])[rank].logprob for place, rank in enumerate(path))


def grown(text: str, count: int, chances: Chances) -> TreeGrowth:
    plan = parse_plan(text)
    assert plan is not None
    assert plan.scored
    growth = plan.begin(count)
    while growth.open:
        growth.grow({path: chances.after(path)[: growth.branches(path)] for path in growth.open})
        assert len(growth.inner) <= max(count, 0), "inner nodes need a lane each"
        assert {path[:-1] for path in growth.inner} <= {(), *growth.inner}, "and their ancestors"
    return growth


def paths_of(tree: DraftTree) -> list[Path]:
    paths = list[Path]()
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def reachable(chances: Chances, depth: int, width: int) -> Iterator[Path]:
    """Return all nodes below the best `width` of each depth."""
    parents: list[Path] = [()]
    for at in range(depth):
        drawn = [(*parent, rank) for parent, rank in product(parents, range(width))]
        yield from drawn
        parents = sorted(drawn, key=lambda path: (-chances.value(path), path))[:width]
        assert at + 1 == len(drawn[0])


@pytest.mark.parametrize("text", PLANS)
def test_the_best_nodes_of_all_that_the_paper_draws_are_verified(text: str) -> None:
    nodes, depth, width = map(int, text.removeprefix("dynamic:").split(","))
    for seed in range(40 if width <= 4 else 6):
        chances = Chances(seed, width)
        wanted = sorted(
            reachable(chances, depth, width), key=lambda path: (-chances.value(path), len(path), path)
        )
        assert paths_of(grown(text, nodes, chances).tree()) == wanted[:nodes]


@pytest.mark.parametrize("text", PLANS)
def test_a_smaller_budget_is_kept_in_nodes_and_lanes_and_what_remains_is_a_tree(text: str) -> None:
    nodes, _, width = map(int, text.removeprefix("dynamic:").split(","))
    plan = parse_plan(text)
    assert plan is not None
    for seed, count in product(range(10 if width <= 4 else 2), range(-1, nodes + 3)):
        growth = grown(text, count, Chances(seed, width))
        tree, most = growth.tree(), max(0, min(count, nodes))
        assert len(tree) <= most
        assert len(growth.inner) <= most
        assert all(parent < place for place, parent in enumerate(tree.parents))
        assert len(set(paths_of(tree))) == len(tree)
        assert not len(tree) or max(map(len, paths_of(tree))) <= plan.depths[len(tree) - 1]
        assert len(tree) == most or width == 1 or nodes > width * len(plan.depths)


def test_it_goes_deep_where_the_drafter_is_sure_and_wide_where_it_is_not() -> None:
    sure = {(): [0.0, -9.0], (0,): [0.0, -9.0], (0, 0): [0.0, -9.0]}
    unsure = {(): [-0.7, -0.7], (0,): [-3.0, -3.1], (1,): [-3.0, -3.1]}
    shapes = []
    for chances in (sure, unsure):
        plan = parse_plan("dynamic:4,3,2")
        assert plan is not None
        growth = plan.begin(3)
        while growth.open:
            growth.grow(
                {
                    path: [Child(rank, rank, one) for rank, one in enumerate(chances.get(path, [-5.0, -5.0]))]
                    for path in growth.open
                }
            )
        shapes.append(paths_of(growth.tree()))
    assert shapes == [[(0,), (0, 0), (0, 0, 0)], [(0,), (1,), (0, 0)]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dynamic:", "dynamic:NODES,DEPTH,WIDTH"),
        ("dynamic:9,4", "dynamic:NODES,DEPTH,WIDTH"),
        ("dynamic:a,4,3", "dynamic:NODES,DEPTH,WIDTH"),
        ("dynamic:64,5,4", "at most 63 tokens"),
        ("dynamic:9,0,3", "at least one"),
        ("dynamic:0", "at least one"),
        ("dynamic:3,4,1", "no deeper"),
    ],
)
def test_what_makes_no_tree_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(BadTree, match=words):
        parse_plan(text)


def test_the_flag_bounds_a_step_by_the_tree() -> None:
    for text, nodes in (("dynamic:30", 30), ("4,2,1", 20), ("dynamic:2", 2)):
        settings = DecodeSettings.from_argv(["--speculative-model=x", f"--speculative-tree={text}"])
        assert settings.step_tokens == max(8, 1 + nodes)
        assert settings.tree_plan is not None
        assert len(settings.tree_plan.depths) == nodes
    assert DecodeSettings.from_argv(["--speculative-model=x"]).tree_plan is None


def test_the_drawn_token_has_the_score_of_the_likeliest_and_forced_ones_are_certain() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0, 2.5]])
    logprobs = logits[0].log_softmax(0)
    row = SampleRow(SamplingParams(temperature=0.0), (1,), ())
    assert scored_children(logits, row, 3) == [
        (1, pytest.approx(float(logprobs[1]))),
        (4, pytest.approx(float(logprobs[4]))),
        (2, pytest.approx(float(logprobs[2]))),
    ]
    for seed in range(20):
        drawing = SampleRow(SamplingParams(temperature=2.0, seed=seed), (1,), ())
        found = scored_children(logits, drawing, 3)
        assert [token for token, _ in found] == list(likely_children(logits, drawing, 3))
        assert found[0][1] == pytest.approx(float(logprobs[1]))
        assert dict(found[1:]) == {token: pytest.approx(float(logprobs[token])) for token, _ in found[1:]}
    forced = SampleRow(SamplingParams(temperature=0.0, allowed_token_ids=(0, 3)), (1,), ())
    scores = [score for _, score in scored_children(logits, forced, 3)]
    assert sum(map(math.exp, scores)) == pytest.approx(1.0)
