"""The file of API keys: one JSON object a line; empty lines and lines that begin with # are skipped.

    {"name": "billing-1", "tenant": "billing", "sha256": "9f86…", "scopes": ["inference"],
     "requests_per_minute": 600, "tokens_per_minute": 100000, "concurrent_requests": 16}

(in one line). The last three may be absent. So may `"adapters": ["legal", "team-a/*"]`, the LoRA adapters
that the key may use: names, of which a last * stands for any rest; without it all. The file holds no key,
only its SHA-256 (FIPS 180-4): a key has 256 random bits, so that neither a salt nor a slow hash is needed
against guessing.
"""

from __future__ import annotations

import hashlib
import secrets
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diptych.runtime.file_watch import readable_by_all
from gateway.access.quota import Quota

KEY_PREFIX: Final = "dk-"  # so that scanners for leaked secrets recognise a key
_KEY_BYTES: Final = 32
_NAME: Final = r"^[A-Za-z0-9._-]{1,64}$"
MAX_COUNT: Final = 2**40
_Pattern = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._/:@-]{0,127})?\*?$", min_length=1)]
_Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class Scope(StrEnum):
    """A permission of a key. None includes another one."""

    INFERENCE = "inference"  # the public services: generate, tokenise, list models, cancel
    ADMIN = "admin"  # diptych.v1.AdminService


class BadKeyFile(ValueError):
    """The file cannot be used. The text names the line and the reason, never the line's content."""


class NoKeys(BadKeyFile):
    """A valid file without any key."""


class KeyEntry(BaseModel):
    """Line of the file: one key."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, strict=True)

    name: Annotated[str, Field(pattern=_NAME)]
    tenant: Annotated[str, Field(pattern=_NAME)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, strict=False)] = (Scope.INFERENCE,)
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrent_requests: _Count | None = None
    adapters: Annotated[tuple[_Pattern, ...] | None, Field(strict=False)] = None

    @property
    def quota(self) -> Quota:
        return Quota(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)


def fresh_key() -> str:
    """Return a new key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_key_file(path: Path) -> tuple[KeyEntry, ...]:
    """Return the keys of the file at ``path``. Raises `BadKeyFile`."""
    try:
        if readable_by_all(path):
            raise BadKeyFile(f"{path} can be read by every user of this machine: chmod o-r {path}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadKeyFile(f"cannot read {path}: {why}") from None
    return parse_keys(text, str(path))


def parse_keys(text: str, source: str) -> tuple[KeyEntry, ...]:
    """Return the keys in ``text``, the content of ``source``.

    Raises:
        BadKeyFile: a line is bad, or two keys have the same name or digest.
        NoKeys: there is none.
    """
    entries: list[KeyEntry] = []
    names: set[str] = set()
    digests: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        entry = _entry(line, f"{source}, line {number}")
        if entry.name in names or entry.sha256 in digests:
            raise BadKeyFile(f"{source}, line {number}: a line before it has this name or this key")
        names.add(entry.name)
        digests.add(entry.sha256)
        entries.append(entry)
    if not entries:
        raise NoKeys(f"{source} has no key: every call would be refused (diptych key new makes one)")
    return tuple(entries)


def _entry(line: str, where: str) -> KeyEntry:
    try:
        return KeyEntry.model_validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False, include_context=False)[0]
        # A misspelt member may be a key in the wrong place: unknown names are not repeated.
        known = [str(part) for part in fault["loc"][:1] if str(part) in KeyEntry.model_fields]
        what = "is not a JSON object" if fault["type"] == "json_invalid" else fault["msg"]
        raise BadKeyFile(f"{where}: {' '.join([*known, what])}") from None
