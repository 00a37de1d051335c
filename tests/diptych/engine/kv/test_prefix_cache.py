"""Order of eviction against a plain recomputation of the rule."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.kv.prefix_cache import ROOT, PrefixCache

Prefix = tuple[str, ...]
PATHS: list[Prefix] = [("a",), ("a", "a"), ("a", "b"), ("a", "b", "a"), ("b",), ("b", "a"), ("b", "a", "b")]


def key(path: Prefix) -> bytes:
    return "/".join(path).encode() if path else ROOT


EVENTS = st.tuples(st.sampled_from(["add", "use", "rest", "evict"]), st.sampled_from(PATHS))


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_the_oldest_unpinned_leaf_goes_first(events: list[tuple[str, Prefix]]) -> None:
    cache = PrefixCache()
    used_at: dict[Prefix, int] = {}
    held: set[Prefix] = set()
    next_block = 0
    for now, (event, path) in enumerate(events):
        if event == "add":
            possible = path not in used_at and (len(path) == 1 or path[:-1] in used_at)
            assert cache.add(next_block, key(path), key(path[:-1]), referenced=True) == possible
            if possible:
                next_block += 1
                used_at[path] = now
                held.add(path)
        elif event in ("use", "rest") and path in used_at and (path in held) == (event == "rest"):
            block = cache.block_of(key(path))
            assert block is not None
            cache.set_referenced(block, event == "use")
            used_at[path] = now
            held ^= {path}
        elif event == "evict":
            leaves = [p for p in used_at if p not in held and not any(q[:-1] == p for q in used_at)]
            evicted = cache.evict()
            assert (evicted is None) == (not leaves)
            if evicted is not None:
                expected = min(leaves, key=used_at.__getitem__)
                assert evicted[0] == key(expected)
                del used_at[expected]
        pinned = {p[: n + 1] for p in held for n in range(len(p))}
        assert cache.evictable == len(used_at.keys() - pinned)
        cache.invariants()


def test_stale_candidates_do_not_pile_up() -> None:
    cache = PrefixCache()
    cache.add(0, b"k", ROOT, referenced=True)
    for _ in range(2000):
        cache.set_referenced(0, False)
        cache.set_referenced(0, True)
    cache.set_referenced(0, False)
    assert len(cache._heap) < 100
    assert cache.evict() == (b"k", 0)
    assert cache.evict() is None
