"""Random token ids, ordinary ones of nearly any vocabulary unless another range is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_WORDS = """
the of and to in is that it for was on are as with they be at one have this from or had by but what some
we can out other were all there when up use your how said an each she which do their time if will way
about many then them write would like so these her long make thing see him two has look more day could
go come did number sound no most people my over know water than call first who may down side been now
find any new work part take get place made live where after back little only round man year came show
every good me give our under name very through just form great think say help low line before turn cause
much mean right boy old too same tell does set three want air well also play small end put home read
hand port large spell add even land here must big high such follow act why ask men change went light
kind off need house picture try us again animal point mother world near build self earth father head
stand own page
""".split()  # noqa: SIM905 (200 quoted words would hide the list)

MOST_TOKENS = 1 << 31  # of any vocabulary: protocols carry ids in 32 bits, some of them signed


@dataclass(frozen=True)
class TokenSource:
    """Ids that are drawn from `lowest` up to and including `highest`.

    Small ids are control tokens in many models.
    """

    lowest: int = 100
    highest: int = 40_000

    def draw(self, count: int, *key: int) -> tuple[int, ...]:
        """Return `count` ids that depend on the key alone, non-negative numbers: a seed and a position."""
        rng = np.random.default_rng(key)
        return tuple(rng.integers(self.lowest, self.highest, size=count, endpoint=True).tolist())


ANY_TOKENS = TokenSource()


def as_text(ids: Iterable[int]) -> str:
    """Return text in place of token ids, a word for each, for endpoints that take text only.

    Each id becomes a common English word, which is one token with its space in practically every vocabulary
    trained on English. Equal ids give equal words, so shared prefixes stay shared; the length in tokens is
    what the server reports.
    """
    return " ".join(_WORDS[token % len(_WORDS)] for token in ids)
