"""The phases of one attempt as its workers measured them: seconds, summed over attempts for the client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

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


class PhaseBook:
    """What the workers reported of a request's attempts, choice by choice."""

    def __init__(self) -> None:
        self._reports: dict[tuple[int, int], Phases] = {}

    def note(self, attempt: int, choice: int, phases: Phases, *, early: bool = False) -> None:
        """A later report of the same choice replaces an earlier one. ``early``: the prefill worker's, which
        comes on a link of its own and knows less than any other, whenever it comes.
        """
        if early:
            self._reports.setdefault((attempt, choice), phases)
        else:
            self._reports[attempt, choice] = phases

    def of(self, choice: int, attempts: Iterable[int]) -> Phases:
        """Of one choice over its attempts. Where nothing was reported of it, another choice of the same
        attempt tells all but the decode phase.
        """
        return sum((self._one(attempt, choice) for attempt in attempts), Phases())

    def _one(self, attempt: int, choice: int) -> Phases:
        own = self._reports.get((attempt, choice))
        if own is not None:
            return own
        other = next((p for (number, _), p in self._reports.items() if number == attempt), Phases())
        return replace(other, decode=0.0)


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
