"""Records by which gateways agree on models and aliases that were changed while they served. Pure.

    model:NAME   {"path": …, "digest": …, "over": […]}
    alias:NAME   {"shares": [[MODEL, WEIGHT], …], "over": […]}

Without `digest` or `shares` the name stands for nothing any more. `over` has all that the name stood for
before, in the settings of the gateways that were told, and in earlier records. A gateway whose settings say
something that is not among it was started with newer settings: those count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from gateway.model.aliases import BadAlias, ModelAlias, Share
from gateway.model.name_rule import valid_name

MAX_OVER: Final = 32
_MAX_PATH_CHARS: Final = 4096


class BadRecord(ValueError):
    """A record that no gateway of this version wrote."""


class Kind(StrEnum):
    """Subject of a record."""

    MODEL = "model"
    ALIAS = "alias"


@dataclass(frozen=True, slots=True)
class SharedRecord:
    """Content of a name: a model's files, shares of models, or nothing.

    Args:
        path: of the model, where every gateway finds it.
        digest: of the model.
        over: what the name stood for before, as `content`, the latest last.
    """

    kind: Kind
    name: str
    path: str = ""
    digest: str = ""
    shares: tuple[Share, ...] = ()
    over: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.name}"

    @property
    def content(self) -> str:
        """Text of what the name stands for, to compare; empty: for nothing."""
        return self.digest or ",".join(f"{share.model}:{share.weight}" for share in self.shares)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"over": list(self.over)}
        if self.digest:
            value |= {"path": self.path, "digest": self.digest}
        if self.shares:
            value["shares"] = [[share.model, share.weight] for share in self.shares]
        return value

    def alias(self) -> ModelAlias:
        """Return the alias of an alias' record. Raises BadAlias."""
        return ModelAlias(self.name, self.shares)

    def counts_over(self, configured: str | None) -> bool:
        """Return whether it counts for a gateway that starts with this content in its settings."""
        return configured is None or configured in (self.content, *self.over)

    def after(self, before: SharedRecord | None, configured: str | None) -> SharedRecord:
        """Return the record with all that it comes after: an earlier record, and this gateway's settings."""
        over = [] if before is None else [*before.over, before.content]
        over += [] if configured is None else [configured]
        once = dict.fromkeys(one for one in over if one and one != self.content)
        return replace(self, over=tuple(once)[-MAX_OVER:])


def parse_record(key: str, value: Mapping[str, Any]) -> SharedRecord:
    """Return the record of a key. Raises BadRecord."""
    kind, _, name = key.partition(":")
    over, path, digest = value.get("over", []), value.get("path", ""), value.get("digest", "")
    if kind not in tuple(Kind) or not valid_name(name) or not _texts(over, path, digest):
        raise BadRecord(key)
    if bool(digest) != bool(path) or len(path) > _MAX_PATH_CHARS:
        raise BadRecord(key)
    shares = _shares(key, value.get("shares", []))
    if (digest and kind != Kind.MODEL) or (shares and kind != Kind.ALIAS):
        raise BadRecord(key)
    record = SharedRecord(Kind(kind), name, path, digest, shares, tuple(over)[-MAX_OVER:])
    if shares:
        try:
            record.alias()
        except BadAlias:
            raise BadRecord(key) from None
    return record


def parse_records(values: Mapping[str, Mapping[str, Any]]) -> dict[str, SharedRecord]:
    """Return the records among shared values by key; what newer gateways or others wrote is passed over."""
    found = {}
    for key, value in values.items():
        try:
            found[key] = parse_record(key, value)
        except BadRecord:
            continue
    return found


def differences(records: Iterable[SharedRecord], served: Mapping[str, str]) -> list[SharedRecord]:
    """Return the records that a gateway does not follow yet, in an order in which most can be followed.

    Args:
        served: contents of what the gateway serves, by the keys of records.
    """
    other = [one for one in records if served.get(one.key, "") != one.content]
    order = ((Kind.ALIAS, False), (Kind.MODEL, True), (Kind.ALIAS, True), (Kind.MODEL, False))
    return sorted(other, key=lambda one: (order.index((one.kind, bool(one.content))), one.name))


def _texts(over: Any, *texts: Any) -> bool:
    return isinstance(over, list) and all(isinstance(one, str) for one in (*over, *texts))


def _shares(key: str, value: Any) -> tuple[Share, ...]:
    try:
        shares = tuple(Share(model, weight) for model, weight in value)
    except (TypeError, ValueError):
        raise BadRecord(key) from None
    if any(type(one.model) is not str or type(one.weight) is not int for one in shares):
        raise BadRecord(key)
    return shares
