"""Pairs of workers with different drafters: which are formed, and the key chain of their blocks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from gateway.worker_pool.drafter_pairs import kept_by_pair, lost_drafts, pair_candidates
from gateway.worker_pool.prefix_held import Held
from gateway.worker_pool.registry import Worker
from gateway.worker_pool.router import Route, RouteRequest, choose_route
from tests.gateway.worker_pool.test_registry import worker

HITS: Any = SimpleNamespace(
    whole={"d-a": Held(3), "d-b": Held(1), "p-a": Held(2)}, undrafted={"d-b": Held(2), "p-b": Held(4)}
)
"""Blocks of both kinds that workers hold."""


def drafting(worker_id: str, drafter: str) -> Worker:
    made = worker()
    layout = "l+draft/l/fp32+order" if drafter else "l+order"
    role = "prefill" if worker_id.startswith("p") else "decode"
    made.record = dataclasses.replace(
        made.record, worker_id=worker_id, role=role, kv_layout=layout, draft_digest=drafter
    )
    return made


def pairs(prefill: list[Worker], decode: list[Worker]) -> set[tuple[str, str, int, int]]:
    """Return the pairs that a router may form, with the blocks that it counts for each of the two."""
    sources, targets = pair_candidates(prefill, decode, HITS)
    return {
        (p.worker_id, d.worker_id, p.cached_blocks, d.cached_blocks)
        for p in sources
        for d in targets
        if p.kv_format == d.kv_format
    }


def test_workers_with_one_drafter_are_paired_while_there_are_any() -> None:
    p_a, p_b, d_a, d_b = (drafting(name, name[2:]) for name in ("p-a", "p-b", "d-a", "d-b"))
    assert pairs([p_a, p_b], [d_a, d_b]) == {("p-a", "d-a", 2, 3), ("p-b", "d-b", 0, 1)}


def test_a_decode_worker_whose_drafter_no_other_has_is_served_by_all() -> None:
    """With the blocks that lack its drafter's segment, on both sides."""
    p_a, p_c, d_a, d_b = (drafting(name, name[2:]) for name in ("p-a", "p-", "d-a", "d-b"))
    assert pairs([p_a, p_c], [d_a, d_b]) == {("p-a", "d-a", 2, 3), ("p-a", "d-b", 0, 2), ("p-", "d-b", 0, 2)}
    route = choose_route(RouteRequest("r", 100, 120), *pair_candidates([p_c], [d_b], HITS))
    assert isinstance(route, Route)
    assert (route.prefill_id, route.decode_id, route.reason) == ("p-", "d-b", "only_choice")


def test_without_prefill_workers_each_decode_worker_counts_its_own_blocks() -> None:
    _, targets = pair_candidates([], [drafting("d-b", "b")], HITS)
    assert [target.cached_blocks for target in targets] == [1]


def test_blocks_of_a_pair_have_the_drafters_chain_only_with_its_segment() -> None:
    one, same, other, none = (drafting(f"p-{n}", n).record for n in ("a", "a", "b", ""))
    assert kept_by_pair(same, one) == kept_by_pair(None, one) == one.kept == "fp32+a"
    assert kept_by_pair(other, one) == kept_by_pair(none, one) == kept_by_pair(one, none) == "fp32"
    stored = dataclasses.replace(same, kv_layout="l+draft/l/bf16+order")
    assert kept_by_pair(stored, one) == "fp32", "its drafter keeps other numbers"


def test_operators_are_told_of_a_drafter_that_is_of_no_use() -> None:
    one, same, other, none = (drafting(f"p-{n}", n).record for n in ("a", "a", "b", ""))
    assert lost_drafts(one, [other, same]) == lost_drafts(one, []) == lost_drafts(none, [one]) == ""
    assert lost_drafts(one, [other]) == "no worker of the other role has its drafter a: it drafts without it"
