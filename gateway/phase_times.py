"""The phases of one attempt as its workers measured them: seconds, summed over attempts for the client."""

from __future__ import annotations

from dataclasses import dataclass, fields

from diptych.worker.v1 import work_pb2


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds per phase, as in ``diptych.worker.v1.PhaseTimes``, and what was moved and found."""

    prefill_queue: float = 0.0
    grant_wait: float = 0.0
    prefill: float = 0.0
    kv_send: float = 0.0
    kv_receive: float = 0.0
    decode_queue: float = 0.0
    decode: float = 0.0
    kv_bytes_transferred: int = 0
    prefill_steps: int = 0

    def __add__(self, other: Phases) -> Phases:
        return Phases(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def read_phases(times: work_pb2.PhaseTimes) -> Phases:
    """Protobuf → seconds. An absent duration is 0: the phase never ran."""

    def seconds(name: str) -> float:
        return getattr(times, name).ToNanoseconds() / 1e9 if times.HasField(name) else 0.0

    return Phases(
        prefill_queue=seconds("prefill_queue"),
        grant_wait=seconds("grant_wait"),
        prefill=seconds("prefill"),
        kv_send=seconds("kv_send"),
        kv_receive=seconds("kv_receive"),
        decode_queue=seconds("decode_queue"),
        decode=seconds("decode"),
        kv_bytes_transferred=times.kv_bytes_transferred,
        prefill_steps=times.prefill_steps,
    )
