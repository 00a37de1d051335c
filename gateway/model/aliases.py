"""Names that stand for other models: one, or several by weight, as for a canary. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.model.name_rule import NAME_RULE, valid_name

MAX_SHARES: Final = 64
MAX_WEIGHT: Final = 1_000_000
_ITEM: Final = "is not NAME=MODEL, or NAME=MODEL:WEIGHT,MODEL:WEIGHT"


class BadAlias(ValueError):
    """An alias that cannot be served."""


@dataclass(frozen=True, slots=True)
class Share:
    """Part of an alias' requests: those of the weight out of the sum of all weights."""

    model: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """Name and the models that it stands for. Raises BadAlias."""

    name: str
    shares: tuple[Share, ...]

    def __post_init__(self) -> None:
        if not valid_name(self.name):
            raise BadAlias(f"the name {self.name!r} {NAME_RULE}")
        if not 0 < len(self.shares) <= MAX_SHARES:
            raise BadAlias(f"{self.name} must stand for 1 to {MAX_SHARES} models")
        models = [share.model for share in self.shares]
        if len(set(models)) < len(models) or self.name in models:
            raise BadAlias(f"{self.name} must stand for other models, and for each once")
        if any(not 0 <= share.weight <= MAX_WEIGHT for share in self.shares):
            raise BadAlias(f"weights of {self.name} must be from 0 to {MAX_WEIGHT}")
        if not any(share.weight for share in self.shares):
            raise BadAlias(f"{self.name} must stand for a model with a weight above 0")

    @property
    def heaviest(self) -> str:
        """The model with the largest weight, the first of several."""
        return max(self.shares, key=lambda share: share.weight).model

    def choose(self, point: float, ready: Callable[[str], bool]) -> str:
        """Return the model at ``point``, from 0 to below 1, of the shares.

        While one is ready, those that are not get nothing: their shares go to the others.
        """
        shares = [share for share in self.shares if share.weight]
        shares = [share for share in shares if ready(share.model)] or shares
        left = point * sum(share.weight for share in shares)
        for share in shares:
            left -= share.weight
            if left < 0:
                return share.model
        return shares[-1].model


def sticky_point(alias: str, session_id: str) -> float:
    """Return the point of a session, the same at every gateway: its requests stay with their model."""
    digest = hashlib.sha256(f"{alias}\0{session_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def parse_aliases(text: str) -> tuple[ModelAlias, ...]:
    """Return the aliases of ``--model-split``: NAME=MODEL:WEIGHT,… for each, separated by commas.

    Without a weight it is 1. Raises BadAlias.
    """
    found: dict[str, list[Share]] = {}
    shares: list[Share] | None = None
    for item in filter(None, text.split(",")):
        name, equals, target = item.partition("=")
        if equals:
            if name in found:
                raise BadAlias(f"the name {name!r} is given twice")
            shares = found.setdefault(name, [])
        if not equals:
            target = item
        if shares is None or not target:
            raise BadAlias(f"{item!r} {_ITEM}")
        shares.append(_share(target))
    return tuple(ModelAlias(name, tuple(parts)) for name, parts in found.items())


def check_targets(aliases: Sequence[ModelAlias], models: Sequence[str]) -> None:
    """Raise BadAlias for an alias of what is no model, or with the name of one."""
    for alias in aliases:
        if alias.name in models:
            raise BadAlias(f"{alias.name} is the name of a model")
        for share in alias.shares:
            if share.model not in models:
                raise BadAlias(f"{alias.name} stands for {share.model}, which is none of {', '.join(models)}")


def _share(text: str) -> Share:
    model, colon, weight = text.rpartition(":")
    if colon and weight.isascii() and weight.isdecimal():
        return Share(model, int(weight))
    return Share(text)
