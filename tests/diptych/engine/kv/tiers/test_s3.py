"""The tier in a bucket: shared, bounded, refused, and left alone while its server fails."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from diptych.engine.kv.tiers.remote import AWAY_S, RESCAN_S, RemoteTier
from diptych.engine.kv.tiers.s3 import FAILURES, S3Place, S3Store, credentials_of
from tests.s3_server import ACCESS, BUCKET, ENVIRONMENT, S3Server

KEYS = [bytes([number]) * 16 for number in range(1, 8)]
ENTRY = bytes(range(256)) * 4


class Workers:
    """Tiers of several workers over one server, and their clock."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.now = 0.0
        self._stores: list[S3Store] = []

    def tier(self, quota: int | None = None, url: str = "", secret: str = "") -> RemoteTier:
        environment = {**ENVIRONMENT, **({"AWS_SECRET_ACCESS_KEY": secret} if secret else {})}
        place = S3Place.parse(url or self.server.url, environment)
        store = S3Store(place, credentials_of(environment), len(ENTRY), timeout_s=0.3)
        self._stores.append(store)
        return RemoteTier(store, FAILURES, b"f" * 16, len(ENTRY), lambda: self.now, name="s3", quota=quota)

    def close(self) -> None:
        for store in self._stores:
            store.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    with S3Server() as server:
        made = Workers(server)
        yield made
        made.close()


def chain(tier: RemoteTier, keys: list[bytes]) -> None:
    for place, key in enumerate(keys):
        tier.put(key, keys[place - 1] if place else b"", memoryview(ENTRY))


def test_two_workers_share_a_bucket_whose_list_has_pages(workers: Workers) -> None:
    workers.server.page = 2
    one, other = workers.tier(), workers.tier()
    chain(one, KEYS)
    assert (one.get(KEYS[1]), one.parent_of(KEYS[1]), one.used) == (ENTRY, KEYS[0], len(KEYS) * len(ENTRY))
    assert other.get(KEYS[1]) is None, "it does not know yet"
    workers.now += RESCAN_S + 1
    assert other.rescan() == (set(KEYS), set())
    assert [other.get(key) for key in KEYS] == [ENTRY] * len(KEYS)
    assert all(name.startswith("some/where/diptych:kv:") for name in workers.server.objects)


def test_forgotten_entries_are_gone_and_lost_ones_are_misses(workers: Workers) -> None:
    held = workers.tier()
    chain(held, KEYS)
    held.forget(KEYS[2:])
    again = workers.tier()
    assert sorted(key for key, _ in again.items()) == KEYS[:2]
    workers.server.objects.clear()
    assert again.get(KEYS[0]) is None
    assert again.parent_of(KEYS[0]) is None


def test_quota_lets_the_chain_leave_that_was_used_longest_ago(workers: Workers) -> None:
    bounded = workers.tier(quota=4 * len(ENTRY) + 5)
    chain(bounded, KEYS[:3])
    workers.now += 2
    bounded.put(KEYS[5], b"", ENTRY)
    assert bounded.put(KEYS[6], KEYS[5], ENTRY) == [KEYS[2]], "the end of a chain before its beginning"
    assert len(workers.server.objects) == 4
    again = workers.tier(quota=4 * len(ENTRY))
    (left,) = again.put(KEYS[3], b"", ENTRY)
    assert left in (KEYS[1], KEYS[6]), "of others' entries the deepest leaves first"
    unbounded = workers.tier()
    unbounded.put(KEYS[4], b"", ENTRY)
    assert len(workers.server.objects) == 5


def test_connection_that_the_server_closed_is_made_anew(workers: Workers) -> None:
    held = workers.tier()
    workers.server.close_after = True
    chain(held, KEYS[:3])
    assert [held.get(key) for key in KEYS[:3]] == [ENTRY] * 3


def test_tls_connection_that_the_server_closed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with S3Server(context) as server:
        over_tls = Workers(server)
        server.close_after = True
        held = over_tls.tier()
        chain(held, KEYS[:3])
        assert [held.get(key) for key in KEYS[:3]] == [ENTRY] * 3
        over_tls.close()


def test_answer_that_ends_early_is_no_damaged_entry(workers: Workers) -> None:
    held = workers.tier()
    held.put(KEYS[0], b"", ENTRY)
    workers.server.cut = 7
    assert held.get(KEYS[0]) is None
    workers.server.cut = 0
    workers.now += AWAY_S
    assert held.get(KEYS[0]) == ENTRY


def test_object_that_is_too_large_is_cut_and_its_connection_closed(workers: Workers) -> None:
    held = workers.tier()
    held.put(KEYS[0], b"", ENTRY)
    (name,) = workers.server.objects
    workers.server.objects[name] = ENTRY * 100_000
    assert held.get(KEYS[0]) == ENTRY + ENTRY[:1], "the stack sees by the length that it is no entry"
    held.put(KEYS[0], b"", ENTRY)
    assert held.get(KEYS[0]) == ENTRY


@pytest.mark.parametrize("fault", ["freeze", "status"])
def test_server_that_fails_is_a_miss_and_left_alone_for_a_while(workers: Workers, fault: str) -> None:
    held = workers.tier()
    held.put(KEYS[0], b"", ENTRY)
    if fault == "freeze":
        workers.server.freeze()
    else:
        workers.server.status = 503
    assert held.get(KEYS[0]) is None
    asked = len(workers.server.requests)
    assert held.parent_of(KEYS[0]) is None
    with pytest.raises(OSError, match="a moment ago"):
        held.put(KEYS[1], KEYS[0], ENTRY)
    assert len(workers.server.requests) == asked, "it is not asked"
    workers.server.thaw()
    workers.server.status = 0
    workers.now += AWAY_S
    assert held.get(KEYS[0]) == ENTRY


def test_wrong_secret_and_a_missing_bucket_are_named(workers: Workers) -> None:
    forger = workers.tier(secret="another")
    absent = workers.tier(url=workers.server.url.replace(BUCKET, "absent"))
    workers.now += AWAY_S
    with pytest.raises(OSError, match="403, SignatureDoesNotMatch"):
        forger.refresh()
    with pytest.raises(OSError, match="404, NoSuchBucket"):
        absent.put(KEYS[0], b"", ENTRY)
    assert absent.get(KEYS[0]) is None


def test_place_is_read_from_url_and_environment() -> None:
    place = S3Place.parse("s3://my.bucket/a/b/", {"AWS_REGION": "eu-west-1"})
    assert place == S3Place("my.bucket", "a/b/", True, "s3.eu-west-1.amazonaws.com", "eu-west-1")
    place = S3Place.parse("s3://bucket?region=here", {"AWS_ENDPOINT_URL": "http://[::1]:9000/"})
    assert (place.prefix, place.secure, place.host, place.region) == ("", False, "[::1]:9000", "here")
    assert ACCESS in repr(credentials_of(ENVIRONMENT))
    assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in repr(credentials_of(ENVIRONMENT))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://bucket?endpont=http://h", "no 'endpont'"),
        ("s3://key:secret@bucket", "takes no credentials"),
        ("s3://Bucket", "is s3://BUCKET"),
        ("s3:///prefix", "is s3://BUCKET"),
        ("s3://bucket/a b", "is no prefix"),
        ("s3://bucket/../a", "is no prefix"),
        ("s3://bucket?endpoint=host:9000", "the endpoint 'host:9000' is not"),
        ("s3://bucket?endpoint=http://host/path", "is not http://HOST:PORT"),
    ],
)
def test_wrong_place_is_named(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        S3Place.parse(url, {})
    with pytest.raises(ValueError, match="needs AWS_ACCESS_KEY_ID"):
        credentials_of({})
