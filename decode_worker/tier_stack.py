"""Tiers of a decode worker, as its settings name them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

from diptych.engine.kv.tiers.disk import DiskTier
from diptych.engine.kv.tiers.entry import FINGERPRINT_BYTES, EntryFormat
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.stack import TierStack
from diptych.engine.kv.tiers.tier import Tier
from diptych.runtime.kv_tier_specs import DISK, RAM, TierSpec
from diptych.runtime.settings import StartupError
from kvtransfer.drivers.handshake import Fingerprint

_log = logging.getLogger(__name__)


class TierUnusable(StartupError):
    """Tier that cannot be used as it is configured."""


def make_stack(specs: Sequence[TierSpec], fingerprint: Fingerprint, block_bytes: int) -> TierStack | None:
    """Return the tiers that are configured, None without any. Raises TierUnusable.

    Blocks are stored under what two workers must share to exchange them: no other block is ever read.
    """
    if not specs:
        return None
    name = hashlib.blake2b(repr(fingerprint).encode(), digest_size=FINGERPRINT_BYTES).digest()
    form = EntryFormat(name, block_bytes)
    try:
        stack = TierStack([_MAKERS[spec.kind](spec, form) for spec in specs], form)
    except OSError as error:
        raise TierUnusable(f"--kv-tier: {error.strerror}: {error.filename}") from error
    for spec, tier in zip(specs, stack.tiers, strict=True):
        blocks = spec.quota // form.entry_bytes
        if not blocks:
            raise TierUnusable(f"--kv-tier {spec.kind}: one block takes {form.entry_bytes} bytes")
        _log.info("the %s tier has room for %d blocks and holds %d", tier.name, blocks, len(tier.items()))
    return stack


def _disk(spec: TierSpec, form: EntryFormat) -> Tier:
    if spec.folder is None:
        raise ValueError("a disk tier needs a folder")
    return DiskTier(spec.folder, spec.quota, form.fingerprint)


_MAKERS: dict[str, Callable[[TierSpec, EntryFormat], Tier]] = {
    RAM: lambda spec, form: RamTier(spec.quota),
    DISK: _disk,
}
