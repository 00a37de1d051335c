"""The registry of this gateway's workers: record, link, load and assigned work, and their capacity.

A load report is up to a quarter of a second old. The work that this gateway dispatched since then is added,
and its outstanding work is a lower bound, so that a burst does not all go to the worker that was idle a
moment ago.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from diptych.runtime.discovery.records import WorkerRecord
from gateway.admission.capacity import Capacity
from gateway.attempt.types import TEXT_ROLES, Role
from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate
from gateway.worker_pool.codec import Load
from gateway.worker_pool.encoders import EncoderCandidate
from gateway.worker_pool.links import Link, LinkDown
from gateway.worker_pool.local_prefill import LocalCandidate
from gateway.worker_pool.prefix_held import Held
from gateway.worker_pool.step_rates import StepRates

KV_FORMAT = ("model_digest", "dtype", "kv_dtype", "own_layout", "block_size")
"""Properties of the records that are equal for workers that can exchange blocks (drafter_pairs.py)."""
PREFILLING_SEQUENCES = 8  # on their way through one prefill worker
UNKNOWN_BATCH = 65536  # a worker that reports no batch size sets no limit
UNKNOWN_LOAD_COST = 0.1  # of a token in a tier, in tokens to compute, before a worker has loaded any


@dataclass(slots=True)
class AssignedWork:
    """An attempt that a worker has: tokens to compute, and its choices without a terminal message."""

    tokens: int
    choices: set[int]


@dataclass(slots=True)
class Worker:
    """A worker of this gateway.

    ``outstanding``: attempts without a terminal message, by (work id, attempt). ``unreported``: of these, the
    ones that were assigned since the last load report. ``unreported_local``: tokens of prompts that it was
    sent since then to compute itself.
    """

    record: WorkerRecord
    link: Link
    load: Load
    leased: bool = True
    leaving: bool = False  # it announced that it drains: when its link ends, it has not died
    reported: bool = False  # its load, over this link
    rates: StepRates = field(default_factory=StepRates)
    unreported_local: int = 0
    outstanding: dict[tuple[str, int], AssignedWork] = field(default_factory=dict)
    unreported: dict[tuple[str, int], AssignedWork] = field(default_factory=dict)

    @property
    def accepts_work(self) -> bool:
        """True while it may get new work: it does not leave, and is not suspected."""
        return self.leased and not self.load.draining and not self.link.suspected

    @property
    def kv_format(self) -> str:
        """The format of its KV blocks but for a drafter's part, equal for workers that can exchange them."""
        return "/".join(str(getattr(self.record, name)) for name in KV_FORMAT)

    @property
    def max_tokens(self) -> int:
        """Most tokens, prompt and output together, that one request may have here."""
        return min(self.record.pool_tokens, self.record.max_context)

    @property
    def kv_tokens(self) -> int:
        """Size of its pool in tokens a block, without the blocks that a writer may still write to."""
        return (self.record.total_blocks - self.load.quarantined_blocks) * self.record.block_size

    def assign(self, work_id: str, attempt: int, tokens: int, choices: Iterable[int]) -> None:
        """Record an attempt that was sent to this worker; ``tokens`` is its cost there."""
        work = AssignedWork(tokens, set(choices))
        self.outstanding[work_id, attempt] = self.unreported[work_id, attempt] = work

    def complete(self, work_id: str, attempt: int, choices: Collection[int] = ()) -> None:
        """Record that choices of an attempt ended or were cancelled, or both; none given means all."""
        work = self.outstanding.get((work_id, attempt))
        if work is None:
            return
        work.choices -= set(choices or work.choices)
        if not work.choices:
            del self.outstanding[work_id, attempt]
            self.unreported.pop((work_id, attempt), None)

    def on_load(self, load: Load) -> None:
        """Replace the load by a new report."""
        self.load = load
        self.reported = True
        self.leaving |= load.draining
        self.unreported.clear()
        self.unreported_local = 0
        self.rates.record(load.step_times)

    def on_down(self) -> None:
        """Forget its load and its work: nothing that was sent over the link remains."""
        self.load = _recorded_load(self.record)
        self.reported = False
        self.outstanding.clear()
        self.unreported.clear()
        self.unreported_local = 0

    def prefill_candidate(self, held: Held, token_s: float, drafter: str | None = None) -> PrefillCandidate:
        """Return it as a candidate for the router, with the request's blocks here; see `decode_candidate`."""
        return PrefillCandidate(
            self.record.worker_id,
            self._pairs_as(drafter),
            self._waiting_tokens,
            memory_domain=self.record.memory_domain,
            cached_blocks=held.cached,
            pull_cost=self.load.pull_cost,
            tiered_blocks=held.tiered,
            load_cost=self._load_cost(token_s),
        )

    def decode_candidate(self, held: Held, token_s: float, drafter: str | None = None) -> DecodeCandidate:
        """Return it as a candidate for the router, with the request's blocks here.

        `token_s`: seconds a token of prefill, by which loading from tiers is charged. `drafter`: what the
        other worker of a pair must have; None: its own.
        """
        size, unreported = self.record.block_size, self.unreported.values()
        # Choices share the blocks of their prompt, but for the last one, which each fills in its own way.
        promised = sum(-(-work.tokens // size) + len(work.choices) - 1 for work in unreported)
        sequences = self.load.running + self.load.waiting + sum(len(work.choices) for work in unreported)
        return DecodeCandidate(
            self.record.worker_id,
            self._pairs_as(drafter),
            block_size=size,
            max_tokens=self.max_tokens,
            free_blocks=max(self.load.free_blocks - promised, 0),
            sequences=max(sequences, sum(len(work.choices) for work in self.outstanding.values())),
            cached_blocks=held.cached,
            memory_domain=self.record.memory_domain,
            tiered_blocks=held.tiered,
            load_cost=self._load_cost(token_s),
        )

    def encoder_candidate(self) -> EncoderCandidate:
        """Return it as a candidate for what encodes an attempt's images; its tokens are rows."""
        return EncoderCandidate(
            self.record.worker_id, self.record.image_rows, self._waiting_tokens, self.accepts_work
        )

    def _pairs_as(self, drafter: str | None) -> str:
        return f"{self.kv_format}/{self.record.drafter if drafter is None else drafter}"

    @property
    def _waiting_tokens(self) -> int:
        """Tokens that wait here: what it reported and what was sent since, or all that has not ended."""
        waiting = self.load.waiting_tokens + sum(work.tokens for work in self.unreported.values())
        return max(waiting, sum(work.tokens for work in self.outstanding.values()))

    def _load_cost(self, token_s: float) -> float:
        load_s = self.load.tier_token_s
        return UNKNOWN_LOAD_COST if load_s is None else load_s / token_s

    def local_candidate(self, held: Held, token_s: float) -> LocalCandidate:
        """Return it as a candidate for prompts that it computes itself."""
        load = self.load
        return LocalCandidate(
            self.decode_candidate(held, token_s),
            short=load.max_local_prefill_tokens,
            fallback=load.max_fallback_prefill_tokens,
            chunk=load.local_prefill_chunk,
            waiting_tokens=load.waiting_tokens + self.unreported_local,
            rates=self.rates,
        )


def new_worker(record: WorkerRecord, link: Link) -> Worker:
    """Return a worker with the load of its record."""
    return Worker(record, link, _recorded_load(record))


def _recorded_load(record: WorkerRecord) -> Load:
    """Return the load in the directory, which holds until the first report over the link."""
    return Load(
        record.running, record.waiting, record.waiting_tokens, record.free_blocks, record.total_blocks
    )


class WorkerRegistry:
    """Workers by id, linked or not.

    Args:
        falls_back: decode workers may compute prompts themselves while no prefill worker is linked.
    """

    def __init__(self, *, falls_back: bool = True) -> None:
        self._workers: dict[str, Worker] = {}
        self._falls_back = falls_back

    def __iter__(self) -> Iterator[Worker]:
        """Iterate over a copy: workers may come and go meanwhile."""
        return iter(list(self._workers.values()))

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def require(self, worker_id: str) -> Worker:
        """Return a worker. Raises LinkDown for one that is not (or no longer) registered."""
        worker = self._workers.get(worker_id)
        if worker is None:
            raise LinkDown(worker_id)
        return worker

    def add(self, worker: Worker) -> None:
        self._workers[worker.record.worker_id] = worker

    def remove(self, worker_id: str) -> Worker:
        return self._workers.pop(worker_id)

    def is_replaced(self, worker_id: str) -> bool:
        """Return whether a linked worker was started in the place of this one, which is dead."""
        return any(worker_id in w.record.dead for w in self.linked())

    # --- linked workers -------------------------------------------------------------------------------

    def linked(self) -> list[Worker]:
        """Return all workers whose link is up."""
        return [w for w in self._workers.values() if w.link.up]

    def linked_with_text(self) -> list[Worker]:
        """Return those of them that compute the text model."""
        return [w for w in self.linked() if w.record.role != Role.ENCODE.value]

    def is_linked(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and worker.link.up

    def serving(self, role: Role) -> list[Worker]:
        """Return the linked workers of a role; only those that accept work, as long as there are any."""
        linked = [w for w in self.linked() if w.record.role == role.value]
        return [w for w in linked if w.accepts_work] or [w for w in linked if w.leased] or linked

    def missing_role(self) -> Role | None:
        """Return the role that has no worker; None when one compatible pair is linked."""
        prefill, decode = self.serving(Role.PREFILL), self.serving(Role.DECODE)
        if not prefill:
            return Role.PREFILL
        formats = {w.kv_format for w in prefill}
        return None if any(w.kv_format in formats for w in decode) else Role.DECODE

    @property
    def fallback_tokens(self) -> int:
        """Most new tokens of a prompt that a decode worker computes itself while no prefill worker is linked.

        0 while one is, or where none may.
        """
        if not self._falls_back or self.serving(Role.PREFILL):
            return 0
        return max((w.load.max_fallback_prefill_tokens for w in self.serving(Role.DECODE)), default=0)

    def why_not_ready(self) -> str:
        """Return the role without a worker that takes work, or the fields that differ in a pair.

        Empty when ready.
        """
        missing = self.missing_role()
        prefill, decode = self.serving(Role.PREFILL), self.serving(Role.DECODE)
        if missing is None:
            leaving = (role for role in TEXT_ROLES if all(w.load.draining for w in self.serving(role)))
            return next((f"every {role.value} worker that is linked drains" for role in leaving), "")
        if not prefill or not decode:
            return f"no {missing.value} worker is linked"
        one, other = prefill[0].record, decode[0].record
        differ = [name for name in KV_FORMAT if getattr(one, name) != getattr(other, name)]
        values = (f"{name} {getattr(one, name)} and {getattr(other, name)}" for name in differ)
        return f"{one.worker_id} and {other.worker_id} do not fit together: {', '.join(values)}"

    def capacity(self) -> Capacity:
        """Return the decode batches' capacity plus a few prompts in prefill; none while a role is missing.

        Decode workers that compute prompts themselves stand in for a missing prefill worker.
        """
        if self.missing_role() is not None and not self.fallback_tokens:
            return Capacity(0, 0)
        prefill, decode = self.serving(Role.PREFILL), self.serving(Role.DECODE)
        batches = [w.load.max_running or UNKNOWN_BATCH for w in decode]
        return Capacity(
            sum(batches) + PREFILLING_SEQUENCES * len(prefill),
            max(len(prefill), 1),
            kv_tokens=sum(w.kv_tokens for w in decode),
            block_size=self.block_size() or 1,
            window=next(((w.record.window_blocks, w.record.window_places) for w in decode), (0, 0)),
        )

    def token_limit(self) -> int | None:
        """Return the most tokens, prompt and output, that linked workers take; None without a decode worker.

        A prefill worker that was started with a lower --max-model-len bounds them, too.
        """
        read = max((w.record.max_context for w in self.serving(Role.PREFILL)), default=None)
        limit = max((w.max_tokens for w in self.serving(Role.DECODE)), default=None)
        return limit if limit is None or not read else min(limit, read)

    def block_size(self) -> int | None:
        return next((w.record.block_size for w in self.serving(Role.DECODE)), None)
