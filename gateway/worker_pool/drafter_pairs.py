"""Pairs of workers with different drafters: the router's candidates, and what the blocks of a pair keep.

A decode worker is served by the prefill workers that have its drafter: they fill the drafter's segment of its
blocks, too. Where none is there every other one serves it and leaves the segment out, which costs drafts and
nothing else. Such blocks have key chains of their own, so that no drafter reads a segment that was left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from diptych.runtime.discovery.records import WorkerRecord
from gateway.attempt.work import Job
from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate
from gateway.worker_pool.prefix_held import NOTHING, Held
from gateway.worker_pool.prefix_index import PrefixIndexReader
from gateway.worker_pool.registry import Worker
from gateway.worker_pool.step_rates import prefill_token_s

_ANY = "*"
"""Stands for the drafter in pairs that leave its segment out."""


class PromptHits:
    """The blocks of one prompt that workers hold, looked up when they are asked for."""

    def __init__(
        self, prefixes: PrefixIndexReader, workers: Sequence[Worker], job: Job, token_ids: tuple[int, ...]
    ) -> None:
        self._prefixes, self._workers, self._job, self._token_ids = prefixes, workers, job, token_ids

    @cached_property
    def whole(self) -> Mapping[str, Held]:
        """Blocks by worker id that have the segment of the worker's drafter, if it has one."""
        return self._prefixes.hits(self._workers, self._job, self._token_ids)

    @cached_property
    def undrafted(self) -> Mapping[str, Held]:
        """Blocks by worker id that lack it."""
        return self._prefixes.hits(self._workers, self._job, self._token_ids, drafted=False)


def pair_candidates(
    prefill: Sequence[Worker], decode: Sequence[Worker], hits: PromptHits
) -> tuple[list[PrefillCandidate], list[DecodeCandidate]]:
    """Return the router's view of these workers.

    Prefill workers are there twice where a decode worker has a drafter that none of them has, or none.
    """
    token_s = prefill_token_s(w.rates for w in prefill or decode)
    served = {(w.kv_format, w.record.drafter) for w in prefill}
    sources = [w.prefill_candidate(_of(w, hits.whole), token_s) for w in prefill]
    targets, alone = list[DecodeCandidate](), False
    for worker in decode:
        if not served or (worker.kv_format, worker.record.drafter) in served:
            targets.append(worker.decode_candidate(_of(worker, hits.whole), token_s))
        else:
            alone = True
            targets.append(worker.decode_candidate(_of(worker, hits.undrafted), token_s, _ANY))
    if alone:
        sources += [w.prefill_candidate(_of(w, hits.undrafted), token_s, _ANY) for w in prefill]
    return sources, targets


def kept_by_pair(prefill: WorkerRecord | None, decode: WorkerRecord) -> str:
    """Return what the decode worker's blocks of an attempt keep; None: it fills them itself."""
    if prefill is None or prefill.drafter == decode.drafter:
        return decode.kept
    return decode.kv_dtype


def lost_drafts(worker: WorkerRecord, partners: Sequence[WorkerRecord]) -> str:
    """Return why a worker's drafter is of no use to `partners`, those of the other role; empty if it is."""
    if not worker.drafter or not partners or any(one.drafter == worker.drafter for one in partners):
        return ""
    return f"no worker of the other role has its drafter {worker.draft_digest[:12]}: it drafts without it"


def _of(worker: Worker, hits: Mapping[str, Held]) -> Held:
    return hits.get(worker.record.worker_id, NOTHING)
