"""Tiers for KV blocks as settings name them, fastest first: ram:8g, disk:/var/kv:100g, redis://…, s3://…"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

RAM, DISK, REDIS, S3 = KINDS = ("ram", "disk", "redis", "s3")
_SCHEMES = ("redis", "rediss", "unix")
SECRET_FILE = "secret"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt])(?:i?b)?", re.IGNORECASE)
_POWERS = "kmgt"


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Tier that a worker is to have: its kind, the most bytes it may hold, the folder of files.

    A server keeps a limit of its own: there the quota is 0, but for a bucket with `size`.
    """

    kind: str
    quota: int
    folder: Path | None = None
    url: str = field(default="", repr=False)


def parse_tiers(text: str) -> tuple[TierSpec, ...]:
    """Read tiers that are separated by commas. Raises ValueError that names the wrong one."""
    specs = tuple(_parse(part.strip()) for part in text.split(",") if part.strip())
    kinds = [spec.kind for spec in specs]
    if len(set(kinds)) != len(kinds):
        raise ValueError(f"names {next(kind for kind in kinds if kinds.count(kind) > 1)} twice")
    if kinds != sorted(kinds, key=KINDS.index):
        raise ValueError("the faster tier comes first: ram, then disk, then redis, then s3")
    return specs


def kept_secret(specs: tuple[TierSpec, ...]) -> str | None:
    """Return the secret that is kept beside a disk tier, made at the first call; None without such a tier.

    The keys of stored blocks are made with it: under another secret none would be found after a restart.
    Raises OSError.
    """
    folder = next((spec.folder for spec in specs if spec.folder is not None), None)
    if folder is None:
        return None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / SECRET_FILE
    part = folder / f".{SECRET_FILE}-{secrets.token_hex(4)}"
    part.touch(mode=0o600)
    part.write_text(secrets.token_hex(32))
    try:
        os.link(part, path)  # the first of several that start at once makes it
    except FileExistsError:
        pass
    finally:
        part.unlink()
    return path.read_text().strip()


def _parse(text: str) -> TierSpec:
    kind, _, rest = text.partition(":")
    if kind in _SCHEMES:
        parts = urlsplit(text)
        if not (parts.hostname or (kind == "unix" and parts.path)):
            raise ValueError("a tier in a server is redis://HOST:PORT/DB, rediss://… or unix://…")
        return TierSpec(REDIS, 0, url=text)
    if kind == S3:
        size = dict(parse_qsl(urlsplit(text).query)).get("size")
        return TierSpec(S3, 0 if size is None else _bytes(size), url=text)
    if kind not in (RAM, DISK):
        raise ValueError(f"{text!r} is no tier: ram:SIZE, disk:FOLDER:SIZE, redis://… or s3://…")
    folder, colon, size = rest.rpartition(":")
    if kind == RAM and colon:
        raise ValueError(f"{text!r} names a folder: a tier in memory is ram:SIZE")
    if kind == DISK and not folder:
        raise ValueError(f"{text!r} names no folder or no size: disk:FOLDER:SIZE")
    return TierSpec(kind, _bytes(size), Path(folder) if kind == DISK else None)


def _bytes(size: str) -> int:
    found = _SIZE.fullmatch(size)
    quota = int(float(found[1]) * 1024 ** (_POWERS.index(found[2].lower()) + 1)) if found else 0
    if quota < 1 << 20:
        raise ValueError(f"{size!r} is no size of at least 1m, such as 500m, 8g or 1t")
    return quota
