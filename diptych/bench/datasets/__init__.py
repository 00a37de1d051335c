"""Datasets: each makes requests from a count and a seed, the same for the same seed.

A dataset hands out fresh token ids for each seed, so that one round's prompts are no prefix of the next
one's; what a dataset means to be shared is shared within a round. A prompts file is what it is.
"""

from __future__ import annotations

from typing import Protocol

from diptych.bench.request import BenchRequest


class BadDataset(Exception):
    """A file that cannot be read as the dataset that it was given for; the message says where and why."""


class Dataset(Protocol):
    """Source of requests; `name` goes into the results."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """Number of different requests; None where any number can be made."""

    def requests(self, count: int, seed: int) -> list[BenchRequest]:
        """Return exactly `count` requests; a dataset that has fewer begins again."""
