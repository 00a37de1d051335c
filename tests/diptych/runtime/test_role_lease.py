"""The lease of role changes in a real Redis-protocol server: several gateways, expiry, a freeze."""

from __future__ import annotations

import asyncio

import pytest

from diptych.runtime.discovery import store as names
from diptych.runtime.discovery.role_lease import RoleLease
from tests.diptych.runtime.conftest import Store

pytestmark = pytest.mark.asyncio


async def test_one_of_many_gateways_takes_the_lease(store: Store) -> None:
    leases = [RoleLease(store.url, "d") for _ in range(4)]
    tokens = [token for token in await asyncio.gather(*(one.take(60) for one in leases)) if token is not None]
    assert len(tokens) == 1
    other = RoleLease(store.url, "another model")
    assert await other.take(60) is not None
    await leases[0].release("a" * 16, 0)
    assert await leases[1].take(60) is None, "a token of nobody ended the change"
    await leases[0].release(tokens[0], 0)
    assert await leases[1].take(60) is not None
    for one in (*leases, other):
        await one.close()


async def test_lease_expires_and_is_not_given_back_for_another_gateway(store: Store) -> None:
    first, second = RoleLease(store.url, "e"), RoleLease(store.url, "e")
    outdated = await first.take(0.05)
    assert outdated is not None
    await asyncio.sleep(0.1)
    assert await second.take(60) is not None
    await first.release(outdated, 60)
    assert await first.take(60) is None
    assert not await first.pauses()
    for one in (first, second):
        await one.close()


async def test_release_lets_automatic_changes_pause(store: Store) -> None:
    first, second = RoleLease(store.url, "f"), RoleLease(store.url, "f")
    token = await first.take(60)
    assert token is not None
    assert not await second.pauses()
    await first.release(token, 60)
    assert await second.pauses()
    assert await second.take(60) is not None, "an operator's change waits for no pause"
    for one in (first, second):
        await one.close()


async def test_frozen_store_gives_no_lease(store: Store) -> None:
    lease = RoleLease(store.url, "g")
    store.freeze()
    try:
        with pytest.raises(names.STORE_ERRORS):
            await lease.take(60)
    finally:
        store.thaw()
    await lease.close()
