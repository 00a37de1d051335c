"""Anybody adds to a queue that is not full; to a full one those below an equal share, and never too many."""

from __future__ import annotations

import random

import pytest

from gateway.admission.fair_shares import FairShares


def filled(size: int, **held: int) -> FairShares:
    shares = FairShares(size)
    for tenant, tokens in held.items():
        shares.take(tenant, tokens)
    return shares


def test_one_tenant_alone_has_all_of_it() -> None:
    shares = FairShares(100)
    assert shares.fits("a", 500)  # nothing waits
    shares.take("a", 60)
    assert shares.fits("a", 40)
    assert not shares.fits("a", 41)


def test_who_is_below_an_equal_share_comes_into_a_full_queue() -> None:
    shares = filled(100, a=100)
    assert not shares.fits("a", 1)
    shares.take("b", 20)
    assert shares.fits("b", 30)
    assert not shares.fits("b", 31)
    shares.take("c", 20)  # now a third each
    assert shares.fits("b", 13)
    assert not shares.fits("b", 14)
    shares.give_back("a", 100)  # it does not wait any more: not full, whoever asks
    assert shares.fits("b", 60)


def test_of_a_tenant_that_has_none_one_request_may_be_longer_than_a_share() -> None:
    shares = filled(100, a=100)
    assert shares.fits("b", 80)
    assert not shares.fits("b", 101)


def test_never_more_than_twice_its_size() -> None:
    shares = filled(100, a=100, b=90)
    assert shares.fits("c", 10)
    assert not shares.fits("c", 11)


@pytest.mark.parametrize("seed", range(10))
def test_three_floods_leave_a_fourth_tenant_room(seed: int) -> None:
    rng = random.Random(seed)
    shares = FairShares(1000)
    waiting: list[tuple[str, int]] = []
    for _ in range(2000):
        tenant, tokens = rng.choice("aaabc"), rng.randint(1, 50)
        if shares.fits(tenant, tokens):
            shares.take(tenant, tokens)
            waiting.append((tenant, tokens))
        assert shares.total == sum(held for _, held in waiting)
        assert shares.fits("polite", 50)
        if rng.random() < 0.3 and waiting:
            shares.give_back(*waiting.pop(rng.randrange(len(waiting))))
    assert not shares.fits("a", 1000)
