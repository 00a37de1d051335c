"""Publisher and mirror over a real Redis-protocol server, and without one."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable

import pytest
import pytest_asyncio

from diptych.runtime.discovery.mirror import DirectoryMirror
from diptych.runtime.discovery.publisher import DirectoryPublisher
from diptych.runtime.discovery.records import WorkerRecord
from tests.diptych.runtime.conftest import Store
from tests.diptych.runtime.eventually import eventually


def record(worker_id: str, incarnation: int = 1) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role="decode",
        address="127.0.0.1:1",
        incarnation=incarnation,
        model_digest="d",
        model_name="m",
        dtype="fp32",
        kv_dtype="fp32",
        kv_layout="l",
        block_size=16,
        max_context=100,
        total_blocks=10,
        num_threads=1,
    )


def keys(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


class Worker:
    """A worker's cache and its publisher."""

    def __init__(self, url: str, worker_id: str = "a", incarnation: int = 1) -> None:
        self.cache: dict[bytes, None] = {}
        self.publisher = DirectoryPublisher(url, record(worker_id, incarnation), lambda: self.cache)

    def change(self, added: Iterable[bytes], removed: Iterable[bytes] = ()) -> None:
        for key in removed:
            del self.cache[key]
        self.cache |= dict.fromkeys(added)
        self.publisher.prefix_changed(added, removed)

    def clear(self) -> None:
        self.cache.clear()
        self.publisher.cleared()


class Fleet:
    """Makes workers and mirrors, and closes them at the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.opened: list[DirectoryPublisher | DirectoryMirror] = []

    async def worker(self, worker_id: str = "a", incarnation: int = 1, cache: Iterable[bytes] = ()) -> Worker:
        worker = Worker(self.url, worker_id, incarnation)
        worker.cache = dict.fromkeys(cache)
        self.opened.append(worker.publisher)
        await worker.publisher.start()
        return worker

    async def mirror(self) -> DirectoryMirror:
        mirror = DirectoryMirror(self.url)
        self.opened.append(mirror)
        await mirror.start()
        return mirror


@pytest_asyncio.fixture
async def fleet(store: Store) -> AsyncIterator[Fleet]:
    fleet = Fleet(store.url)
    yield fleet
    for one in reversed(fleet.opened):
        await asyncio.wait_for(one.close(), 5)


def ids(mirror: DirectoryMirror) -> set[str]:
    return {worker.worker_id for worker in mirror.workers()}


async def test_workers_and_their_load_are_seen(fleet: Fleet) -> None:
    mirror = await fleet.mirror()
    assert mirror.workers() == []
    await fleet.worker("a")
    b = await fleet.worker("b")
    await eventually(lambda: ids(mirror) == {"a", "b"})
    b.publisher.set_load(running=1, waiting=2, waiting_tokens=300, free_blocks=4)
    await eventually(lambda: {w.waiting_tokens for w in mirror.workers()} == {0, 300})
    [seen] = [w for w in mirror.workers() if w.worker_id == "b"]
    assert seen == b.publisher.record
    assert seen.epoch == 1


async def test_prefixes_follow_the_cache(fleet: Fleet) -> None:
    mirror = await fleet.mirror()
    a, b = await fleet.worker("a"), await fleet.worker("b")
    prompt = keys(100)
    a.change(prompt)
    b.change(prompt[:40])
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 100, "b": 40})
    a.change([], prompt[90:])
    b.change([], prompt[:40])
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 90})
    a.change(prompt[90:])
    a.change([], prompt[95:])
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 95})
    assert mirror.prefix_hits(keys(3)) == {}
    assert mirror.prefix_hits([]) == {}


async def test_blocks_that_leave_for_a_tier_are_named_as_such(fleet: Fleet) -> None:
    first = await fleet.mirror()
    worker = await fleet.worker()
    prompt = keys(700)
    worker.change(prompt)
    await eventually(lambda: first.prefix_hits(prompt) == {"a": 700})
    worker.publisher.prefix_changed([], prompt[690:], prompt[100:690])
    await eventually(lambda: first.prefix_hits(prompt) == {"a": 100})
    second = await fleet.mirror()
    for mirror in (first, second):
        await eventually(lambda one=mirror: one.tier_hits(prompt, one.prefix_hits(prompt)) == {"a": 590})
    worker.publisher.prefix_changed(prompt[100:110], [])
    await eventually(lambda: first.prefix_hits(prompt) == {"a": 110})
    assert first.tier_hits(prompt, {"a": 110}) == {"a": 580}
    worker.publisher.prefix_changed([], [prompt[110]])
    await eventually(lambda: first.tier_hits(prompt, {"a": 110}) == {})


async def test_tiers_that_outlived_a_worker_are_named_at_its_start(fleet: Fleet) -> None:
    mirror = await fleet.mirror()
    prompt = keys(5)
    publisher = DirectoryPublisher(fleet.url, record("a", 2), lambda: prompt[:2], lambda: prompt)
    fleet.opened.append(publisher)
    await publisher.start()
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 2})
    assert mirror.tier_hits(prompt, {"a": 2}) == {"a": 3}


async def test_a_fresh_mirror_knows_everything_at_once(fleet: Fleet) -> None:
    """As a second gateway that never saw the first one's requests."""
    prompt = keys(3000)
    worker = await fleet.worker(cache=prompt)
    await eventually(lambda: worker.publisher.connected)
    late = keys(1)
    worker.change(late)
    first = await fleet.mirror()
    await eventually(lambda: first.prefix_hits(late) == {"a": 1})
    second = await fleet.mirror()
    assert second.connected
    assert second.prefix_hits(prompt) == {"a": 3000}
    assert second.prefix_hits(late) == {"a": 1}


async def test_a_clear_voids_everything_before_it(fleet: Fleet) -> None:
    mirror = await fleet.mirror()
    worker = await fleet.worker()
    old, new = keys(5), keys(5)
    worker.change(old)
    await eventually(lambda: mirror.prefix_hits(old) == {"a": 5})
    worker.clear()
    worker.change(new)
    await eventually(lambda: mirror.prefix_hits(new) == {"a": 5})
    assert mirror.prefix_hits(old) == {}
    assert mirror.workers()[0].epoch == 2


async def test_a_restart_under_the_same_name_starts_empty(fleet: Fleet) -> None:
    mirror = await fleet.mirror()
    old = await fleet.worker(incarnation=9)
    prompt = keys(5)
    old.change(prompt)
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 5})
    assert old.publisher._task is not None
    old.publisher._task.cancel()  # as SIGKILL would: nothing is taken back
    await fleet.worker(incarnation=2)
    await eventually(lambda: mirror.workers()[0].incarnation == 2)
    assert mirror.prefix_hits(prompt) == {}


async def test_of_two_with_one_name_the_newer_one_stays(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = await fleet.mirror()
    frozen = await fleet.worker(incarnation=1)
    await eventually(lambda: [w.incarnation for w in mirror.workers()] == [1])
    newer = await fleet.worker(incarnation=2)
    await eventually(lambda: frozen.publisher.replaced)
    await eventually(lambda: [w.incarnation for w in mirror.workers()] == [2])
    assert not newer.publisher.replaced
    assert caplog.text.count("another process is worker a by now") == 1
    await frozen.publisher.close()
    await asyncio.sleep(1.5)
    assert [w.incarnation for w in mirror.workers()] == [2], "who has lost the name ends no lease"


async def test_a_dead_workers_lease_ends_and_a_closed_ones_at_once(fleet: Fleet) -> None:
    mirror = await fleet.mirror()
    dead, closed = await fleet.worker("dead"), await fleet.worker("closed")
    await eventually(lambda: ids(mirror) == {"dead", "closed"})
    await asyncio.sleep(3.1)  # the mirror's own time of grace is over
    assert ids(mirror) == {"dead", "closed"}
    await closed.publisher.close()
    await eventually(lambda: ids(mirror) == {"dead"}, 2.5)  # the lease would take three
    assert dead.publisher._task is not None
    dead.publisher._task.cancel()
    assert await eventually(lambda: ids(mirror) == set(), 20) > 1


async def test_redis_away_at_the_start_is_no_error(fleet: Fleet, store: Store) -> None:
    store.kill()
    prompt = keys(3)
    start = time.monotonic()
    worker = await fleet.worker(cache=prompt)
    mirror = await fleet.mirror()
    assert time.monotonic() - start < 10
    assert not mirror.connected
    assert not worker.publisher.connected
    assert mirror.workers() == []
    assert mirror.prefix_hits(prompt) == {}
    store.start()
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 3})
    assert mirror.connected


async def test_redis_killed_and_restarted_empty(fleet: Fleet, store: Store) -> None:
    mirror = await fleet.mirror()
    worker = await fleet.worker()
    prompt, more = keys(5), keys(5)
    worker.change(prompt)
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 5})
    store.kill()
    await eventually(lambda: not mirror.connected and not worker.publisher.connected)
    worker.change(more)
    await asyncio.sleep(3.5)  # longer than a lease
    assert mirror.prefix_hits(prompt) == {"a": 5}
    store.start()
    seen: set[frozenset[str]] = set()

    def republished() -> bool:
        seen.add(frozenset(ids(mirror)))
        return mirror.prefix_hits(more) == {"a": 5}

    await eventually(republished)
    assert mirror.prefix_hits(prompt) == {"a": 5}
    assert seen == {frozenset({"a"})}, "the worker was never missing"


async def test_redis_flushed(fleet: Fleet, store: Store) -> None:
    mirror = await fleet.mirror()
    worker = await fleet.worker()
    prompt = keys(5)
    worker.change(prompt)
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 5})
    with store.client() as client:
        client.flushall()
    seen: set[frozenset[str]] = set()

    def republished() -> bool:
        seen.add(frozenset(ids(mirror)))
        return worker.publisher.record.epoch == 2 and mirror.prefix_hits(prompt) == {"a": 5}

    await eventually(republished)
    assert seen == {frozenset({"a"})}
    worker.change([], prompt[2:])
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 2})


async def test_redis_frozen_never_delays_a_lookup(fleet: Fleet, store: Store) -> None:
    mirror = await fleet.mirror()
    worker = await fleet.worker()
    prompt = keys(1000)
    worker.change(prompt)
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 1000})
    store.freeze()
    slowest = 0.0
    seen: set[tuple[object, ...]] = set()

    def noticed() -> bool:
        nonlocal slowest
        start = time.perf_counter()
        hits = mirror.prefix_hits(prompt)
        slowest = max(slowest, time.perf_counter() - start)
        seen.add((*ids(mirror), hits.get("a", 0)))
        return not mirror.connected and not worker.publisher.connected

    await eventually(noticed, 20)
    worker.change([], prompt[500:])
    await asyncio.sleep(3.5)  # the leases expire behind the frozen server's back
    noticed()
    assert seen == {("a", 1000)}
    store.thaw()
    await eventually(lambda: noticed() or mirror.prefix_hits(prompt) == {"a": 500}, 20)
    assert {hits for _, hits in seen} <= {1000, 500}, "the worker and its blocks were never missing"
    # One that waited for the store would take as long as that is frozen; a busy machine may take a core.
    assert slowest < 1, f"a look-up took {slowest * 1000:.1f} ms"


async def test_lost_updates_are_found_by_the_lease(fleet: Fleet) -> None:
    """A stream that goes on under older ids, as after a failover to a server whose clock is behind."""
    mirror = await fleet.mirror()
    worker = await fleet.worker()
    first, lost = keys(2), keys(3)
    worker.change(first)
    await eventually(lambda: mirror.prefix_hits(first) == {"a": 2})
    mirror._position = "99999999999999-0"
    await asyncio.sleep(0.3)
    worker.change(lost)
    assert await eventually(lambda: mirror.prefix_hits(lost) == {"a": 3}) > 0.1


async def test_garbage_in_the_store_is_passed_over(fleet: Fleet, store: Store) -> None:
    mirror = await fleet.mirror()
    worker = await fleet.worker()
    await eventually(lambda: ids(mirror) == {"a"})
    with store.client() as client:
        client.sadd("diptych:workers", "bad")
        client.set("diptych:worker:bad", "{not json")
        client.xadd("diptych:prefix", {"w": "a"})
        client.xadd("diptych:prefix", {"w": "nobody", "i": 1, "e": 1, "s": 1, "a": b"", "r": b""})
    prompt = keys(2)
    worker.change(prompt)
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 2})
    await asyncio.sleep(0.7)
    assert ids(mirror) == {"a"}
    assert mirror.connected


async def test_the_blocks_of_a_worker_evicted_by_the_store_come_back(fleet: Fleet, store: Store) -> None:
    """Redis at its memory limit may throw away any key, also the largest."""
    mirror = await fleet.mirror()
    worker = await fleet.worker(cache=keys(4))
    await eventually(lambda: worker.publisher.connected)
    with store.client() as client:
        for name in client.keys("diptych:owned:*"):
            client.delete(name)
    await eventually(lambda: worker.publisher.record.epoch == 2)
    await eventually(lambda: mirror.prefix_hits(list(worker.cache)[:1]) == {"a": 1})


async def test_a_long_outage_ends_in_one_fresh_list(
    fleet: Fleet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.runtime.discovery.publisher._MAX_PENDING", 50)
    mirror = await fleet.mirror()
    worker = await fleet.worker()
    await eventually(lambda: worker.publisher.connected)
    store.freeze()
    await eventually(lambda: not worker.publisher.connected)
    prompt = keys(60)
    worker.change(prompt)
    assert len(worker.publisher._pending) == 0
    store.thaw()
    await eventually(lambda: mirror.prefix_hits(prompt) == {"a": 60})
    assert worker.publisher.record.epoch == 2


async def test_nobody_there_is_told_once_with_the_place_and_without_the_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = "redis://:hidden@127.0.0.1:1/0"
    mirror, publisher = DirectoryMirror(url), DirectoryPublisher(url, record("a"))
    await publisher.start()
    await mirror.start()
    await asyncio.gather(mirror.close(), publisher.close())
    server = "redis://127.0.0.1:1/0"
    told = f"the directory at {server} does not answer (ConnectionError): start one, or give --redis-url"
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sorted(warnings) == [f"{told}; routing from memory", f"{told}; trying on"]
    assert "hidden" not in caplog.text


async def test_one_that_comes_and_goes_is_told_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    failures = 0

    async def fails(_: DirectoryMirror) -> None:
        nonlocal failures
        failures += 1
        raise TimeoutError

    monkeypatch.setattr(DirectoryMirror, "_follow", fails)
    await fleet.mirror()
    await eventually(lambda: failures == 5)
    assert caplog.text.count("does not answer (TimeoutError)") == 1
    assert caplog.text.count("following the directory: 0 workers") == 2  # at first, and after what was told


def test_a_malformed_url_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="scheme"):
        DirectoryMirror("127.0.0.1:6379")


async def test_closing_in_the_middle_of_anything_is_quick(store: Store) -> None:
    async def live(make: type[DirectoryMirror] | type[Worker], lifetime_s: float) -> float:
        one = make(store.url)
        closing = one if isinstance(one, DirectoryMirror) else one.publisher
        await closing.start()
        if isinstance(one, Worker):
            one.change(keys(600))
        await asyncio.sleep(lifetime_s)
        start = time.monotonic()
        await closing.close()
        return time.monotonic() - start

    lives = [live(make, 0.003 * i) for i in range(20) for make in (DirectoryMirror, Worker)]
    assert max(await asyncio.gather(*lives)) < 10
