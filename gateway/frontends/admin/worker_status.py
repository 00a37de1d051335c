"""State of the workers for operators: which are usable, why others are not, and the load of each.

Pure: records of the worker pool in, protobuf out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from diptych.runtime.discovery.records import WorkerRecord
from diptych.v1 import admin_pb2 as pb
from gateway.worker_pool.codec import Load
from gateway.worker_pool.drafter_pairs import lost_drafts
from gateway.worker_pool.registry import Worker

_ROLES = {
    "prefill": pb.WORKER_ROLE_PREFILL,
    "decode": pb.WORKER_ROLE_DECODE,
    "encode": pb.WORKER_ROLE_ENCODE,
}


def worker_status(
    workers: Iterable[Worker],
    now: float,
    slow: Callable[[str], str] = lambda _: "",
    adapters: Mapping[bytes, str] = MappingProxyType({}),
    model: str = "",
) -> list[pb.WorkerInfo]:
    """Return one entry a worker of a model, prefill first, then by id.

    Args:
        workers: those that the gateway wants to work with.
        now: on the event loop's clock, as `Link.last_seen`.
        slow: why a worker is ejected or on probation, or an empty text.
        adapters: names of adapters by digest.
        model: its name.
    """
    known = list(workers)
    infos = [_info(worker, known, now, slow, adapters) for worker in known]
    for info in infos:
        info.model = model
    return sorted(infos, key=lambda info: (info.role, info.worker_id))


def other_models(records: Iterable[WorkerRecord]) -> list[pb.WorkerInfo]:
    """Return one entry for each worker of the directory that serves none of the gateway's models."""
    return [_other_model(record) for record in records]


def _info(
    worker: Worker,
    others: Sequence[Worker],
    now: float,
    slow: Callable[[str], str],
    adapters: Mapping[bytes, str],
) -> pb.WorkerInfo:
    state, detail = _state(worker, others)
    if state == pb.WORKER_STATE_READY:
        detail = slow(worker.record.worker_id) or detail
    info = pb.WorkerInfo(
        worker_id=worker.record.worker_id,
        role=_ROLES.get(worker.record.role, pb.WORKER_ROLE_UNSPECIFIED),
        address=worker.record.address,
        state=state,
        detail=detail,
        load=_load(worker.load, adapters),
    )
    if worker.link.last_seen is not None:
        info.since_heartbeat.FromNanoseconds(round(max(now - worker.link.last_seen, 0.0) * 1e9))
    return info


def _state(worker: Worker, others: Sequence[Worker]) -> tuple[pb.WorkerState, str]:
    if not worker.link.up:
        return pb.WORKER_STATE_CONNECTING, "no link to it at the moment"
    if worker.load.draining:
        becomes = worker.load.becomes
        then = "" if becomes is None else f", and becomes a {becomes.value} worker"
        return pb.WORKER_STATE_DRAINING, f"it takes nothing new{then}"
    if not worker.leased and any(_stands_in(other, worker) for other in others):
        return pb.WORKER_STATE_DRAINING, "it has left the directory: it gets nothing new"
    if worker.link.suspected:
        return pb.WORKER_STATE_CONNECTING, "heartbeat or step overdue; not routed"
    if why := _no_partner(worker, others):
        return pb.WORKER_STATE_INCOMPATIBLE, why
    if not worker.leased:
        return pb.WORKER_STATE_READY, "it is not in the directory; it serves all the same"
    partners = [other.record for other in _partners(worker, others) if other.kv_format == worker.kv_format]
    return pb.WORKER_STATE_READY, lost_drafts(worker.record, partners)


def _no_partner(worker: Worker, others: Sequence[Worker]) -> str:
    """Return why no other worker can work with this one; empty where one can, or there is no other yet."""
    record = worker.record
    if record.role == "encode":
        readers = [other.record.image_rows for other in others if other.record.role == "prefill"]
        return "no prefill worker takes its rows" if readers and record.image_rows not in readers else ""
    partners = _partners(worker, others)
    if partners and all(partner.kv_format != worker.kv_format for partner in partners):
        return "no worker of the other role can exchange blocks with it"
    return ""


def _partners(worker: Worker, others: Sequence[Worker]) -> list[Worker]:
    """Return the workers of the other role that compute the text model."""
    roles = (worker.record.role, "encode")
    return [] if worker.record.role == "encode" else [w for w in others if w.record.role not in roles]


def _stands_in(other: Worker, worker: Worker) -> bool:
    """Return whether the router prefers another worker of the role to one without a lease."""
    return other.record.role == worker.record.role and other.leased and other.link.up


def _other_model(record: WorkerRecord) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=record.worker_id,
        role=_ROLES.get(record.role, pb.WORKER_ROLE_UNSPECIFIED),
        address=record.address,
        state=pb.WORKER_STATE_INCOMPATIBLE,
        detail="it serves another model than this gateway",
        model=record.model_name,
    )


def _load(load: Load, adapters: Mapping[bytes, str]) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        quarantined_blocks=load.quarantined_blocks,
        local_prefills=load.local_prefills,
        drafted_tokens=load.drafted_tokens,
        accepted_draft_tokens=load.accepted_draft_tokens,
        adapters=sorted(adapters.get(digest, digest.hex()[:12]) for digest in load.adapters),
        max_loras=load.max_loras,
        ranks=(pb.WorkerRank(**rank._asdict()) for rank in load.ranks),
        stages=load.stages,
    )
