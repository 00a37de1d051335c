"""The tier in a real server: shared by two workers, emptied under them, stopped, and started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from diptych.engine.kv.tiers.remote import AWAY_S, RESCAN_S, RemoteTier
from tests.diptych.runtime.conftest import Store

KEYS = [bytes([number]) * 16 for number in range(1, 6)]
ENTRY = bytes(range(256)) * 4


class Server(Store):
    """A server whose clients are closed with it, and the clock of its tiers."""

    now = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._clients: list[Redis] = []

    def client(self) -> Redis:
        made = Redis(port=self.port, socket_timeout=0.5, retry=Retry(NoBackoff(), 0))
        self._clients.append(made)
        return made

    def tier(self, fingerprint: bytes = b"f" * 16) -> RemoteTier:
        failures = (RedisError, OSError)
        return RemoteTier(self.client(), failures, fingerprint, len(ENTRY), lambda: self.now)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "valkey")
    made.start()
    yield made
    made.close()


def test_two_workers_share_a_server_and_another_kind_of_blocks_is_apart(server: Server) -> None:
    one, other, strange = server.tier(), server.tier(), server.tier(b"g" * 16)
    one.put(KEYS[0], b"", ENTRY)
    one.put(KEYS[1], KEYS[0], memoryview(ENTRY))
    assert (one.get(KEYS[1]), one.parent_of(KEYS[1]), one.used) == (ENTRY, KEYS[0], 2 * len(ENTRY))
    assert other.get(KEYS[1]) is None, "it does not know yet"
    server.now += RESCAN_S + 1
    assert other.rescan() == ({KEYS[0], KEYS[1]}, set())
    assert other.rescan() == (set(), set())
    other.put(KEYS[2], KEYS[1], ENTRY)
    assert sorted(other.items()) == [(KEYS[0], b""), (KEYS[1], KEYS[0]), (KEYS[2], KEYS[1])]
    assert other.get(KEYS[0]) == ENTRY
    strange.refresh()
    assert strange.items() == []


def test_entries_outlive_the_worker_and_forgotten_ones_are_gone_from_the_server(server: Server) -> None:
    first = server.tier()
    for place, key in enumerate(KEYS):
        first.put(key, KEYS[place - 1] if place else b"", ENTRY)
    first.close()
    again = server.tier()
    assert [key for key, _ in sorted(again.items())] == KEYS
    again.forget(KEYS[2:])
    assert [key for key, _ in sorted(server.tier().items())] == KEYS[:2]


def test_entry_that_the_server_let_go_is_a_miss(server: Server) -> None:
    held = server.tier()
    held.put(KEYS[0], b"", ENTRY)
    server.client().flushall()
    assert held.parent_of(KEYS[0]) == b""
    assert held.get(KEYS[0]) is None
    assert held.parent_of(KEYS[0]) is None


def test_server_that_fails_is_a_miss_and_left_alone_for_a_while(server: Server) -> None:
    held = server.tier()
    held.put(KEYS[0], b"", ENTRY)
    server.freeze()
    assert held.get(KEYS[0]) is None
    server.thaw()
    assert held.parent_of(KEYS[0]) is None, "nothing is expected of it"
    with pytest.raises(OSError, match="a moment ago"):
        held.put(KEYS[1], KEYS[0], ENTRY)
    with pytest.raises(OSError, match="a moment ago"):
        held.forget([KEYS[0]])
    server.now += AWAY_S
    assert held.get(KEYS[0]) == ENTRY


def test_server_that_is_full_refuses_and_keeps_what_it_has(server: Server) -> None:
    held = server.tier()
    held.put(KEYS[0], b"", ENTRY)
    server.client().config_set("maxmemory", 1)
    with pytest.raises(OSError, match="OutOfMemory"):
        held.put(KEYS[1], KEYS[0], ENTRY)
    assert held.parent_of(KEYS[1]) is None


def test_names_of_others_are_passed_over(server: Server) -> None:
    client = server.client()
    prefix = f"diptych:kv:{(b'f' * 16).hex()}:"
    for name in ("", "zz:", "01", "01:zz"):
        client.set(prefix + name, b"x")
    assert server.tier().items() == []


def test_server_that_is_not_there_at_the_start_is_found_later(server: Server) -> None:
    server.kill()
    held = server.tier()
    assert held.items() == []
    server.start()
    server.now += RESCAN_S + 1
    assert held.rescan() == (set(), set())
    held.put(KEYS[0], b"", ENTRY)
    assert held.get(KEYS[0]) == ENTRY
