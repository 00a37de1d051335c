"""Names and forms of what is in Redis, and connections to it that never wait long.

    diptych:generation       random; absent or changed after the store lost its data
    diptych:workers          set of worker ids, live or lately so
    diptych:worker:ID        Lease as JSON; expires LEASE_MS after its last renewal
    diptych:epoch:ID         counter, grows at every start and every cache clear of the worker
    diptych:owned:ID:I:E     hash of the worker's cached block keys (fields; the value is the medium: empty
                             for its pool, TIERED) in the life (incarnation I, epoch E); its field "seq" is
                             the last update's number
    diptych:prefix           stream of all workers' updates, capped

A hash and not a set holds the blocks, because its number must never be apart from its content.
"""

import itertools
from collections.abc import Mapping, Sequence

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.typing import EncodableT, FieldT

from diptych.runtime.block_hash import KEY_BYTES
from diptych.runtime.discovery.prefix_index import PrefixEvent
from diptych.runtime.discovery.records import Identity

LEASE_MS = 3000
OWNED_MS = 30_000
"""Block lists outlive a lease: a worker cut off from Redis for some seconds need not write its list again."""
EPOCH_S = 86_400
STREAM_LENGTH = 2048

GENERATION = "diptych:generation"
WORKERS = "diptych:workers"
STREAM = "diptych:prefix"
SEQ_FIELD = b"seq"
POOL, TIERED = b"", b"t"
"""Media of a block: the worker's pool, or a tier below it from which it has to be loaded."""

STORE_ERRORS = (RedisError, OSError, TimeoutError, RuntimeError)
"""Errors that a Redis which is gone, frozen or confused raises. Never lets a request fail.

RuntimeError is what uvloop says of a write to a connection that was reset.
"""

_CONNECT_S = 0.25
_TIMEOUT_S = 0.5


def worker_key(worker_id: str) -> str:
    return f"diptych:worker:{worker_id}"


def epoch_key(worker_id: str) -> str:
    return f"diptych:epoch:{worker_id}"


def owned_key(worker_id: str, identity: Identity) -> str:
    return f"diptych:owned:{worker_id}:{identity.incarnation:x}:{identity.epoch}"


def connect(url: str) -> Redis:
    """Return a client for background tasks; it connects at its first command.

    Raises ValueError for a bad URL.

    redis-py's own defaults retry with growing pauses, about 12 s on a server that does not answer;
    our tasks have their own pace, so here nothing is retried and no command waits over half a second.
    """
    return Redis.from_url(
        url,
        socket_connect_timeout=_CONNECT_S,
        socket_timeout=_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


def encode_event(event: PrefixEvent) -> dict[FieldT, EncodableT]:
    fields: dict[FieldT, EncodableT] = {
        "w": event.worker_id,
        "i": event.identity.incarnation,
        "e": event.identity.epoch,
        "s": event.seq,
        "a": b"".join(event.added),
        "r": b"".join(event.removed),
    }
    if event.tiered:
        fields["t"] = b"".join(event.tiered)
    return fields


def decode_event(fields: Mapping[bytes, bytes]) -> PrefixEvent:
    """Parse an entry. Raises ValueError for one that no worker of this version wrote."""
    try:
        return PrefixEvent(
            worker_id=fields[b"w"].decode(),
            identity=Identity(int(fields[b"i"]), int(fields[b"e"])),
            seq=int(fields[b"s"]),
            added=_split_keys(fields[b"a"]),
            removed=_split_keys(fields[b"r"]),
            tiered=_split_keys(fields.get(b"t", b"")),
        )
    except KeyError as error:
        raise ValueError(f"a prefix event without {error}") from error


def _split_keys(data: bytes) -> tuple[bytes, ...]:
    if len(data) % KEY_BYTES:
        raise ValueError(f"block keys come in {KEY_BYTES} bytes each")
    return tuple(data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES))


def hash_fields(keys: Sequence[bytes], medium: bytes = POOL) -> list[bytes]:
    """Return fields with the medium as their values, as HSET takes them."""
    return list(itertools.chain.from_iterable((key, medium) for key in keys))
