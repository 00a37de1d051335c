"""Key file of a test, and the authorization headers of its keys."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gateway.access.key_file import digest_of, fresh_key


class Keys:
    """``keys.add("acme")`` makes a key, writes the file anew, and returns the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}

    def add(self, tenant: str, *scopes: str, **quotas: int) -> str:
        key = fresh_key()
        name = f"{tenant}-{len(self.entries)}"
        digest = digest_of(key).hex()
        self.entries[key] = {
            "name": name,
            "tenant": tenant,
            "sha256": digest,
            "scopes": scopes or ("inference",),
            **quotas,
        }
        self.write()
        return key

    def remove(self, key: str) -> None:
        del self.entries[key]
        self.write()

    def write(self, text: str | None = None) -> None:
        """Replace the file, as operators' tools do."""
        fresh = self.path.with_suffix(".new")
        lines = [json.dumps(entry) for entry in self.entries.values()]
        fresh.touch(0o600)
        fresh.write_text("# keys\n\n" + "\n".join(lines) + "\n" if text is None else text)
        os.replace(fresh, self.path)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """gRPC metadata."""
    return (("authorization", f"Bearer {key}"),)
