"""The phase times of attempts as the workers measured them, summed over attempts for the client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from diptych.worker.v1 import work_pb2


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds in each phase, as in ``diptych.worker.v1.PhaseTimes``, with bytes moved and steps taken.

    ``local_prefills`` and ``remote_prefills``: prompts computed by the decode worker itself, and by a prefill
    worker. ``tier_blocks``: blocks that came from a worker's tiers. ``drafted_tokens`` and
    ``accepted_draft_tokens`` are those of a whole attempt.
    """

    prefill_queue: float = 0.0
    grant_wait: float = 0.0
    prefill: float = 0.0
    kv_send: float = 0.0
    kv_receive: float = 0.0
    decode_queue: float = 0.0
    decode: float = 0.0
    kv_bytes_transferred: int = 0
    prefill_steps: int = 0
    local_prefills: int = 0
    remote_prefills: int = 0
    tier_blocks: int = 0
    kv_load: float = 0.0
    encode: float = 0.0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class PhaseReports:
    """The workers' reports on the attempts at one request, by attempt and choice."""

    def __init__(self) -> None:
        self._reports: dict[tuple[int, int], PhaseTimes] = {}

    def record(self, attempt: int, choice: int, times: PhaseTimes, *, early: bool = False) -> None:
        """Record a report in place of an earlier one on the same choice.

        ``early`` marks the prefill worker's report. It comes on another link and knows less than any other,
        so it replaces none, whenever it comes.
        """
        if early:
            self._reports.setdefault((attempt, choice), times)
        else:
            self._reports[attempt, choice] = times

    def total(self, choice: int, attempts: Iterable[int]) -> PhaseTimes:
        """Sum the times of one choice over its attempts.

        An attempt without a report on this choice counts with another choice's, but for the decode phase.
        """
        return sum((self._times(attempt, choice) for attempt in attempts), PhaseTimes())

    def drafts(self) -> tuple[int, int]:
        """Return the drafted and the accepted tokens of all attempts: each attempt's latest report."""
        latest: dict[int, tuple[int, int]] = {}
        for (attempt, _), times in self._reports.items():
            latest[attempt] = max(
                latest.get(attempt, (0, 0)), (times.drafted_tokens, times.accepted_draft_tokens)
            )
        return sum(drafted for drafted, _ in latest.values()), sum(right for _, right in latest.values())

    def _times(self, attempt: int, choice: int) -> PhaseTimes:
        own = self._reports.get((attempt, choice))
        if own is not None:
            return own
        other = next((p for (number, _), p in self._reports.items() if number == attempt), PhaseTimes())
        return replace(other, decode=0.0)


def read_phase_times(times: work_pb2.PhaseTimes) -> PhaseTimes:
    """Convert protobuf durations to seconds; an absent one is 0, for the phase never ran."""

    def seconds(name: str) -> float:
        return getattr(times, name).ToNanoseconds() / 1e9 if times.HasField(name) else 0.0

    return PhaseTimes(
        prefill_queue=seconds("prefill_queue"),
        grant_wait=seconds("grant_wait"),
        prefill=seconds("prefill"),
        kv_send=seconds("kv_send") + seconds("kv_pull"),
        kv_receive=seconds("kv_receive"),
        decode_queue=seconds("decode_queue"),
        decode=seconds("decode"),
        kv_bytes_transferred=times.kv_bytes_transferred,
        prefill_steps=times.prefill_steps,
        local_prefills=int(times.local_prefill),
        remote_prefills=int(times.prefill_steps > 0 and not times.local_prefill),
        tier_blocks=times.tier_blocks,
        kv_load=seconds("kv_load"),
        encode=seconds("encode"),
        drafted_tokens=times.drafted_tokens,
        accepted_draft_tokens=times.accepted_draft_tokens,
    )
