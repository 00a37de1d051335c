"""An adapter as a gateway knows it."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.runtime.adapter_files import DIGEST_BYTES
from gateway.model.name_rule import NAME_RULE, valid_name


@dataclass(frozen=True, slots=True)
class Adapter:
    """A name, and the content that it stands for: another content is another adapter."""

    name: str
    digest: bytes
    path: str
    """Absolute, and the same on every worker's host."""
    rank: int = 0
    """The largest of its modules; 0 = its files do not say it."""

    @property
    def short_digest(self) -> str:
        """The first 12 hex digits, for people."""
        return self.digest.hex()[:12]

    def to_json(self) -> dict[str, str | int]:
        """Return what gateways tell each other of it, but for the name."""
        return {"digest": self.digest.hex(), "path": self.path, "rank": self.rank}

    @classmethod
    def from_json(cls, name: str, value: object) -> Adapter:
        """Return the adapter of `to_json`. Raises ValueError for what is none."""
        if not isinstance(value, dict) or not valid_name(name):
            raise ValueError("not an adapter")
        digest, path, rank = value.get("digest"), value.get("path"), value.get("rank")
        if not isinstance(digest, str) or not isinstance(path, str) or type(rank) is not int:
            raise ValueError("not an adapter")
        if len(data := bytes.fromhex(digest)) != DIGEST_BYTES:
            raise ValueError("not an adapter's digest")
        return cls(name, data, path, rank)


def parse_lora(text: str) -> tuple[str, str]:
    """Return name and path of NAME=PATH. Raises ValueError."""
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise ValueError(f"{text!r} is not NAME=PATH")
    if not valid_name(name):
        raise ValueError(f"the name {name!r} {NAME_RULE}")
    return name, path
