"""Tiers of a worker, as its settings name them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from diptych.engine.kv.tiers.disk import DiskTier
from diptych.engine.kv.tiers.entry import FINGERPRINT_BYTES, EntryFormat
from diptych.engine.kv.tiers.loaded import Loaded
from diptych.engine.kv.tiers.pinned import NotPinned, PageLock, PinnedSlots
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.remote import RemoteTier
from diptych.engine.kv.tiers.s3 import FAILURES, S3Place, S3Store, credentials_of
from diptych.engine.kv.tiers.stack import TierStack
from diptych.engine.kv.tiers.tier import Tier
from diptych.runtime.kv_tier_specs import DISK, RAM, REDIS, S3, TierSpec
from diptych.runtime.settings import StartupError
from diptych.runtime.worker_metrics import WorkerMetrics
from kvtransfer.drivers.handshake import Fingerprint

SHARED = (DISK, REDIS, S3)
"""Kinds that several workers may have together."""
_CONNECT_S, _ANSWER_S = 0.25, 0.4
_MOST_READS, _READ_BYTES = 32, 128 << 20
"""Most reads of a bucket at a time, and most bytes of what they answer."""
_log = logging.getLogger(__name__)


class TierUnusable(StartupError):
    """Tier that cannot be used as it is configured."""


def make_stack(
    specs: Sequence[TierSpec],
    fingerprint: Fingerprint,
    block_bytes: int,
    *,
    reads_shared: bool = False,
    lock: PageLock | None = None,
) -> TierStack | None:
    """Return the tiers that are configured, None without any. Raises TierUnusable.

    Blocks are stored under what two workers must share to exchange them, a drafter's segment included: no
    other block is ever read. Workers of other degrees find them, those with other parts do not. With
    `reads_shared` nothing is stored in tiers that workers share: those that the blocks are handed to do that.
    Memory is page-locked where `lock` is given, if it can be.
    """
    if not specs:
        return None
    stored = repr(fingerprint.of_whole_blocks)
    name = hashlib.blake2b(stored.encode(), digest_size=FINGERPRINT_BYTES).digest()
    form = EntryFormat(name, block_bytes)
    try:
        tiers = [
            _ram(spec, form, lock) if spec.kind == RAM else _MAKERS[spec.kind](spec, form) for spec in specs
        ]
        stack = TierStack(tiers, form, SHARED if reads_shared else ())
    except OSError as error:
        raise TierUnusable(f"--kv-tier: {error.strerror}: {error.filename}") from error
    for spec, tier in zip(specs, stack.tiers, strict=True):
        slots = tier.slots if isinstance(tier, RamTier) else None
        blocks = spec.quota // form.entry_bytes if slots is None else slots.entries
        if not blocks and spec.quota:
            raise TierUnusable(f"--kv-tier {spec.kind}: one block takes {form.entry_bytes} bytes")
        room = str(blocks) if blocks else "the server's limit of"
        _log.info("the %s tier has room for %s blocks and holds %d", tier.name, room, len(tier.items()))
    return stack


def watch_stack(stack: TierStack, metrics: WorkerMetrics) -> None:
    """Let the metrics show what the tiers hold."""
    for tier in stack.tiers:
        metrics.tier_bytes.labels(tier.name).set_function(lambda tier=tier: tier.used)  # type: ignore[misc]
        metrics.tier_blocks_loaded.labels(tier.name)
    metrics.tier_entries_damaged.set_function(lambda: stack.damaged)


def count_loaded(loaded: Loaded, metrics: WorkerMetrics) -> None:
    """Count blocks that came from tiers."""
    for tier, blocks in loaded.blocks.items():
        metrics.tier_blocks_loaded.labels(tier).inc(blocks)


def _ram(spec: TierSpec, form: EntryFormat, lock: PageLock | None) -> Tier:
    """Return a tier in memory: page-locked for copies of a GPU, or else as it is, which the log says."""
    if lock is not None:
        try:
            slots = PinnedSlots(spec.quota, form.entry_bytes, lock)
        except NotPinned as error:
            _log.warning(
                "the ram tier is not page-locked, and copied more slowly: %s; raise the limit of locked "
                "memory (ulimit -l, LimitMEMLOCK=, a container's memlock), or make the tier smaller",
                error,
            )
        else:
            _log.info("the ram tier has %d MiB of page-locked memory", spec.quota >> 20)
            return RamTier(slots.entries * form.entry_bytes, slots=slots)
    return RamTier(spec.quota)


def _disk(spec: TierSpec, form: EntryFormat) -> Tier:
    if spec.folder is None:
        raise ValueError("a disk tier needs a folder")
    return DiskTier(spec.folder, spec.quota, form.fingerprint)


def _redis(spec: TierSpec, form: EntryFormat) -> Tier:
    try:
        client = Redis.from_url(
            spec.url,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise TierUnusable(f"--kv-tier redis: {error}") from None
    return RemoteTier(client, (RedisError, OSError), form.fingerprint, form.entry_bytes)


def _s3(spec: TierSpec, form: EntryFormat) -> Tier:
    try:
        place, credentials = S3Place.parse(spec.url, os.environ), credentials_of(os.environ)
    except ValueError as error:
        raise TierUnusable(f"--kv-tier s3: {error}") from None
    return RemoteTier(
        S3Store(place, credentials, form.entry_bytes),
        FAILURES,
        form.fingerprint,
        form.entry_bytes,
        name=S3,
        quota=spec.quota or None,
        at_once=min(max(_READ_BYTES // form.entry_bytes, 1), _MOST_READS),
    )


_MAKERS: dict[str, Callable[[TierSpec, EntryFormat], Tier]] = {
    DISK: _disk,
    REDIS: _redis,
    S3: _s3,
}
