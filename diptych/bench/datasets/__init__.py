"""What is asked: every dataset makes requests from a count and a seed, the same for the same seed.

A dataset hands out fresh token ids for each seed, so that one round's prompts are no prefix of the next
one's; what a dataset means to be shared is shared within a round. A prompts file is what it is.
"""

from __future__ import annotations

from typing import Protocol

from diptych.bench.request import BenchRequest


class BadDataset(Exception):
    """A file that cannot be read as the dataset that it was given for; says where and why."""


class Dataset(Protocol):
    """`name` goes into the results."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """How many different requests there are; None when it makes as many as are asked for."""

    def requests(self, count: int, seed: int) -> list[BenchRequest]:
        """Exactly `count` requests; where the dataset has fewer, it begins again."""
