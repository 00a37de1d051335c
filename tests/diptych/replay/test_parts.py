"""Parts of the replay: pool, index, histogram, fleets by name."""

from __future__ import annotations

import random

import pytest

from diptych.replay.events import Events
from diptych.replay.histogram import Histogram
from diptych.replay.pool import Pool
from diptych.replay.prefix_index import ReplayedIndex
from diptych.replay.result import ReplayResult
from diptych.replay.sweep import greatest_rate, parse_fleets
from tests.diptych.replay.fleets import FLEET


def test_pool_keeps_chains_until_their_blocks_are_needed() -> None:
    changes: list[tuple[int, bool]] = []
    pool = Pool(10, 4, lambda chunk, came: changes.append((chunk, came)))
    pool.take(9)  # 8 of them become the chunks 1 and 2
    assert [pool.publish(chunk) for chunk in (1, 2, 2)] == [True, True, False]
    pool.invariants(1)
    pool.leave((1, 2))
    pool.give_back(1)
    assert (pool.available, pool.cached((1, 2, 3)), pool.available_beside((1,))) == (10, 2, 6)
    pool.take(3)  # evicts the end of the chain
    assert (pool.cached((1, 2)), changes[-1]) == (1, (2, False))
    pool.use((1,))
    with pytest.raises(ValueError, match="more than"):
        pool.take(4)
    pool.invariants(3)


def test_index_equals_a_look_into_every_pool() -> None:
    source, events = random.Random(0), Events()
    index, pools = ReplayedIndex(events, delay_s=0.0), [set[int]() for _ in range(5)]
    for _ in range(400):
        worker, chunk = source.randrange(5), source.randrange(8)
        came = chunk not in pools[worker]
        (pools[worker].add if came else pools[worker].remove)(chunk)
        index.record(worker, chunk, came)
        chain = source.sample(range(8), source.randint(0, 8))
        leading = {
            number: next((at for at, one in enumerate(chain) if one not in pool), len(chain))
            for number, pool in enumerate(pools)
        }
        assert index.hits(chain) == {number: count for number, count in leading.items() if count}


def test_index_learns_of_a_change_after_its_delay() -> None:
    events = Events()
    index = ReplayedIndex(events, delay_s=1.0)
    index.record(3, 7, True)
    events.run_until(0.9)
    assert index.hits((7,)) == {}
    events.run_until(1.0)
    assert index.hits((7, 8)) == {3: 1}


def test_percentiles_are_right_to_half_a_percent() -> None:
    histogram = Histogram()
    for value in range(1, 1001):
        histogram.add(value / 1000, weight=2)
    for percent in (1, 50, 90, 99):
        assert histogram.percentile(percent) == pytest.approx(percent / 100, rel=0.006)
    assert Histogram().percentile(50) is None


def test_fleets_are_named_by_both_roles_or_by_their_sum() -> None:
    assert parse_fleets("2:2,1:3") == [(2, 2), (1, 3)]
    assert parse_fleets("4,2:2") == [(1, 3), (2, 2), (3, 1)]
    for text in ("", "1", "0:2", "x", "1:2:3", "2000"):
        with pytest.raises(ValueError, match=r"worker|both roles"):
            parse_fleets(text)


@pytest.mark.parametrize(("start", "limit"), [(1.0, 37.0), (100.0, 37.0), (37.0, 37.0)])
def test_greatest_rate_is_found_to_three_percent(start: float, limit: float) -> None:
    rates = {}

    def replay(rate: float) -> ReplayResult:
        result = ReplayResult(FLEET, requests=100, good=95 if rate <= limit else 80)
        rates[id(result)] = result, rate
        return result

    found = rates[id(greatest_rate(replay, start, 0.9))][1]
    assert 0.97 * limit <= found <= limit


def test_a_level_out_of_reach_ends() -> None:
    assert greatest_rate(lambda rate: ReplayResult(FLEET, requests=10), 1.0, 0.9).good == 0
