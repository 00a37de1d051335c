"""The adapters of a gateway by name, who may use them and who does."""

from __future__ import annotations

import asyncio

import pytest

from diptych.runtime.errors import InvalidParameter, UnknownAdapter, UnknownModel
from gateway.access.access import Caller, anonymous
from gateway.access.quota import QuotaUsage
from gateway.adapters.adapter import Adapter, parse_lora
from gateway.adapters.registry import AdapterRegistry
from gateway.model.served_model import ServedModel

A, B = Adapter("a", b"A" * 32, "/a"), Adapter("team/b", b"B" * 32, "/b")


@pytest.fixture
def registry(bundled: ServedModel) -> AdapterRegistry:
    registry = AdapterRegistry(bundled.card)
    registry.put(A)
    registry.put(B)
    return registry


def caller(*adapters: str) -> Caller:
    return Caller("tenant", frozenset(), QuotaUsage("key"), adapters)


def test_an_adapter_is_chosen_by_model_or_by_lora(registry: AdapterRegistry) -> None:
    base, anyone = registry.card.name, anonymous()
    assert registry.choose("a", "", anyone) == A
    assert registry.choose(base, "a", anyone) == A
    assert registry.choose(registry.card.aliases[0], "a", anyone) == A
    assert registry.choose("a", "a", anyone) == A
    assert registry.choose(base, "", anyone) is None
    assert registry.choose("nothing", "", anyone) is None  # the caller says what is served


def test_a_choice_that_contradicts_itself_is_refused(registry: AdapterRegistry) -> None:
    anyone = anonymous()
    with pytest.raises(UnknownAdapter):
        registry.choose(registry.card.name, "nothing", anyone)
    with pytest.raises(UnknownModel):
        registry.choose("nothing", "a", anyone)
    with pytest.raises(InvalidParameter, match="lora"):
        registry.choose("team/b", "a", anyone)
    with pytest.raises(InvalidParameter, match="model"):
        registry.choose("", "a", anyone)


def test_a_key_uses_only_what_it_may(registry: AdapterRegistry) -> None:
    assert registry.visible(anonymous()) == [A, B]
    assert registry.visible(caller("team/*")) == [B]
    assert registry.visible(caller("a")) == [A]
    assert registry.visible(caller()) == []
    assert registry.choose("a", "", caller("team/*")) is None
    with pytest.raises(UnknownAdapter):  # as if there were none
        registry.choose(registry.card.name, "a", caller("team/*"))


def test_what_requests_hold_is_needed_after_its_name_is_gone(registry: AdapterRegistry) -> None:
    changes: list[set[bytes]] = []
    registry.on_change = lambda: changes.append(set(registry.needed))
    with registry.use(A):
        registry.remove("a")
        assert registry.get("a") is None
        assert registry.leaving() == [A]
        assert set(registry.needed) == {A.digest, B.digest}
    assert set(registry.needed) == {B.digest}
    assert changes[-1] == {B.digest}
    assert registry.leaving() == []


def test_another_content_takes_a_name_while_the_old_one_runs(registry: AdapterRegistry) -> None:
    new = Adapter("a", b"C" * 32, "/c")
    with registry.use(A):
        registry.put(new)
        assert registry.choose("a", "", anonymous()) == new
        assert registry.running(A.digest) == 1
        assert registry.running(new.digest) == 0
        assert set(registry.needed) == {A.digest, B.digest, new.digest}


async def test_unused_waits_for_the_last_request(registry: AdapterRegistry) -> None:
    await asyncio.wait_for(registry.unused(A.digest), 1)
    with registry.use(A):
        with registry.use(A):
            waiting = asyncio.ensure_future(registry.unused(A.digest))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)


def test_lora_flags_are_name_and_path() -> None:
    assert parse_lora("legal=/adapters/legal=1") == ("legal", "/adapters/legal=1")
    for bad in ("legal", "legal=", "=/a", "a b=/a", "-a=/a", f"{'a' * 129}=/a"):
        with pytest.raises(ValueError, match=r"NAME=PATH|letters"):
            parse_lora(bad)
    assert Adapter.from_json("a", A.to_json()) == A
    for value in (None, {}, {**A.to_json(), "rank": True}, {**A.to_json(), "digest": "00"}):
        with pytest.raises(ValueError):  # noqa: PT011
            Adapter.from_json("a", value)
