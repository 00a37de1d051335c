"""One worker as this gateway knows it: its record, its link, its load, and what we gave it to do.

A load report is up to a quarter of a second old. What this gateway dispatched since then is added, and
what it has outstanding is a lower bound, so that a burst does not all go to the worker that was idle a
moment ago.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from diptych.runtime.discovery.records import WorkerRecord
from gateway.worker_pool.codec import Load
from gateway.worker_pool.links import Link
from gateway.worker_pool.router import DecodeCandidate, PrefillCandidate

KV_FORMAT = ("model_digest", "dtype", "kv_dtype", "kv_layout", "block_size")
"""What of their records is the same for workers that can exchange blocks."""


@dataclass(slots=True)
class AssignedWork:
    """An attempt that a worker has: tokens to compute, and which of its choices had no last word yet."""

    tokens: int
    choices: set[int]


@dataclass(slots=True)
class Worker:
    """``outstanding``: the attempts that have not had their last word, by (work id, attempt)."""

    record: WorkerRecord
    link: Link
    load: Load
    leased: bool = True
    leaving: bool = False  # it said that it drains: when its link ends, it has not died
    outstanding: dict[tuple[str, int], AssignedWork] = field(default_factory=dict)
    fresh: dict[tuple[str, int], AssignedWork] = field(
        default_factory=dict
    )  # of these, since the last load report

    @property
    def welcome(self) -> bool:
        """Whether it may be given something new: it does not leave, and nothing about it is odd."""
        return self.leased and not self.load.draining and not self.link.suspected

    @property
    def kv_format(self) -> str:
        """Equal for workers that can exchange blocks."""
        return "/".join(str(getattr(self.record, name)) for name in KV_FORMAT)

    @property
    def max_tokens(self) -> int:
        """Most tokens, prompt and output together, that one request may have here."""
        return min(self.record.total_blocks * self.record.block_size, self.record.max_context)

    @property
    def kv_tokens(self) -> int:
        """What it can hold: all but the blocks that a writer may still write to."""
        return (self.record.total_blocks - self.load.quarantined_blocks) * self.record.block_size

    def given(self, work_id: str, attempt: int, tokens: int, choices: Iterable[int]) -> None:
        """An attempt went to this worker; ``tokens`` is what it costs there."""
        self.outstanding[work_id, attempt] = self.fresh[work_id, attempt] = AssignedWork(tokens, set(choices))

    def done(self, work_id: str, attempt: int, choices: Collection[int] = ()) -> None:
        """These choices of the attempt had their last word, or were cancelled, or both; none named: all."""
        given = self.outstanding.get((work_id, attempt))
        if given is None:
            return
        given.choices -= set(choices or given.choices)
        if not given.choices:
            del self.outstanding[work_id, attempt]
            self.fresh.pop((work_id, attempt), None)

    def reported(self, load: Load) -> None:
        self.load = load
        self.leaving |= load.draining
        self.fresh.clear()

    def lost(self) -> None:
        """The link is down: nothing we gave it is still there."""
        self.load = _recorded_load(self.record)
        self.outstanding.clear()
        self.fresh.clear()

    def as_prefill(self) -> PrefillCandidate:
        waiting = self.load.waiting_tokens + sum(given.tokens for given in self.fresh.values())
        outstanding = sum(given.tokens for given in self.outstanding.values())
        return PrefillCandidate(self.record.worker_id, self.kv_format, max(waiting, outstanding))

    def as_decode(self, cached_blocks: int) -> DecodeCandidate:
        size = self.record.block_size
        # Choices share the blocks of their prompt, but for the last one, which each fills in its own way.
        promised = sum(-(-given.tokens // size) + len(given.choices) - 1 for given in self.fresh.values())
        sequences = self.load.running + self.load.waiting + sum(len(g.choices) for g in self.fresh.values())
        return DecodeCandidate(
            self.record.worker_id,
            self.kv_format,
            block_size=size,
            max_tokens=self.max_tokens,
            free_blocks=max(self.load.free_blocks - promised, 0),
            sequences=max(sequences, sum(len(given.choices) for given in self.outstanding.values())),
            cached_blocks=cached_blocks,
        )


def new_worker(record: WorkerRecord, link: Link) -> Worker:
    return Worker(record, link, _recorded_load(record))


def _recorded_load(record: WorkerRecord) -> Load:
    """The load in the directory, until the link tells better."""
    return Load(
        record.running, record.waiting, record.waiting_tokens, record.free_blocks, record.total_blocks
    )
