"""A directory that answers with errors, or that others have written to: a real server each time."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from redis import Redis

from diptych.runtime.discovery import store as keys_of
from diptych.runtime.discovery.mirror import DirectoryMirror
from diptych.runtime.discovery.publisher import DirectoryPublisher
from tests.diptych.runtime.conftest import Store
from tests.diptych.runtime.eventually import eventually
from tests.diptych.runtime.test_directory import record


def out_of_memory(client: Redis) -> None:
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)


def read_only(client: Redis) -> None:
    client.replicaof("127.0.0.1", 1)


def acl(client: Redis) -> None:
    client.execute_command("ACL", "SETUSER", "default", "-set", "-xrevrange")


def login(client: Redis) -> None:
    client.config_set("requirepass", "word")
    client.execute_command("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "yes")


def other_data(client: Redis) -> None:
    client.delete(keys_of.WORKERS)
    client.set(keys_of.WORKERS, "another program's")


FAULTS = [
    (out_of_memory, "has no memory left for writes"),
    (read_only, "is a read-only replica"),
    (acl, "forbids this login a command or a key"),
    (login, "refuses this login"),
    (other_data, "has other data under diptych: keys"),
]


@pytest.mark.parametrize(("fault", "cause"), FAULTS)
async def test_publisher_names_the_error_of_its_directory(
    store: Store, caplog: pytest.LogCaptureFixture, fault: Callable[[Redis], None], cause: str
) -> None:
    publisher = DirectoryPublisher(store.url, record("a"))
    await publisher.start()
    with store.client() as client, caplog.at_level(logging.WARNING):
        fault(client)
        await eventually(lambda: cause in caplog.text, 10)
    late = "does not answer (TimeoutError)"  # said of a directory that a busy machine kept from answering
    assert not [one for one in caplog.messages if "start one" in one and late not in one]
    await publisher.close()


@pytest.mark.parametrize(("fault", "cause"), [FAULTS[2], FAULTS[3], FAULTS[4]])
async def test_mirror_names_the_error_of_its_directory_and_keeps_its_workers(
    store: Store, caplog: pytest.LogCaptureFixture, fault: Callable[[Redis], None], cause: str
) -> None:
    publisher, mirror = DirectoryPublisher(store.url, record("a")), DirectoryMirror(store.url)
    await publisher.start()
    await mirror.start()
    await eventually(lambda: mirror.outage == "" and bool(mirror.workers()), 10)
    with store.client() as client, caplog.at_level(logging.WARNING):
        fault(client)
        if fault is acl:  # forbids the question that a following mirror asks once only
            client.execute_command("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "yes")
        await eventually(lambda: mirror.outage.endswith(cause), 10)
    assert [one.worker_id for one in mirror.workers()] == ["a"]
    await mirror.close()
    await publisher.close()


async def test_mirror_passes_over_what_other_programs_wrote(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with store.client() as client:
        client.sadd(keys_of.WORKERS, b"\xff\xfe", "no-json", "deep", "a-list")
        client.set(keys_of.worker_key("no-json"), b"\xff")
        client.set(keys_of.worker_key("deep"), "[" * 100_000)
        client.rpush(keys_of.worker_key("a-list"), "x")
        client.xadd(keys_of.STREAM, {"w": b"\xff", "i": "x"})
    publisher = DirectoryPublisher(store.url, record("good"))
    await publisher.start()
    mirror = DirectoryMirror(store.url)
    with caplog.at_level(logging.WARNING):
        await mirror.start()
        await eventually(lambda: [one.worker_id for one in mirror.workers()] == ["good"], 10)
        with store.client() as client:
            client.xadd(keys_of.STREAM, {"w": b"\xff", "i": "x"})
        await asyncio.sleep(1.2)  # two more polls
    assert mirror.connected
    for junk in ("member b'", "'no-json'", "'deep'", "an update"):
        assert len([one for one in caplog.messages if f"passed over {junk}" in one or junk in one]) == 1
    await mirror.close()
    await publisher.close()


@pytest.mark.parametrize("junk", ["another type", "no number"])
async def test_mirror_follows_on_where_the_blocks_of_a_worker_are_junk(store: Store, junk: str) -> None:
    good, bad = (DirectoryPublisher(store.url, record(name), lambda: [b"k" * 16]) for name in ("good", "bad"))
    await good.start()
    await bad.start()
    await eventually(lambda: bad.connected and good.connected, 10)
    with store.client() as client:
        (owned,) = client.keys("diptych:owned:bad:*")
        await bad.close()
        lease = client.get(keys_of.worker_key("good")).replace(b"good", b"bad")
        client.set(keys_of.worker_key("bad"), lease)
        client.sadd(keys_of.WORKERS, "bad")
        if junk == "another type":
            client.set(owned, "x")
        else:
            client.hset(owned, "seq", "x")
    mirror = DirectoryMirror(store.url)
    await mirror.start()
    await eventually(lambda: mirror.connected and mirror.prefix_hits([b"k" * 16]) == {"good": 1}, 10)
    assert {one.worker_id for one in mirror.workers()} == {"good", "bad"}
    await mirror.close()
    await good.close()
