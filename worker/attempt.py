"""One attempt at one request, as both workers read it from the gateway's `Work`.

Token ids only: no text, no tenant. An attempt that follows a preemption brings the tokens that the
client already has; they are output, not prompt, so that penalties, limits and the counter of the
random draws go on where they stopped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from diptych.worker.v1 import work_pb2
from engine.sampling import SampleRow, SamplingParams
from kvtransfer.messages import Key


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the gateway asked for; `deadline` is on this process's `time.monotonic()`."""

    key: Key
    prompt_ids: list[int]
    delivered_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    cache_namespace: bytes
    cache_read: bool
    cache_write: bool
    priority: int
    reserve_worst_case: bool
    deadline: float | None
    trace: tuple[str, str] | None  # traceparent, tracestate

    @property
    def token_ids(self) -> list[int]:
        """What has to be prefilled."""
        return self.prompt_ids + self.delivered_ids

    @property
    def prefill_span(self) -> str:
        """Key of the prefill worker's span; the decode worker's links to it."""
        return f"prefill/{self.key[1]}"

    @property
    def decode_span(self) -> str:
        return f"decode/{self.key[1]}"

    def sample_row(self, output_ids: list[int]) -> SampleRow:
        """What the next token after `output_ids` depends on; below min_tokens no stop token can be drawn."""
        held_back = tuple(self.stop_token_ids) if len(output_ids) < self.min_tokens else ()
        return SampleRow(self.params, self.prompt_ids, output_ids, held_back)

    @classmethod
    def from_work(cls, work: work_pb2.Work, *, max_context: int) -> Attempt:
        """Read the message; `max_tokens` is cut where the model's context ends."""
        prompt_ids = list(work.token_ids[: work.prompt_tokens])
        time_left = work.time_left.ToTimedelta().total_seconds() if work.HasField("time_left") else None
        return cls(
            key=(work.id.request_id, work.id.attempt),
            prompt_ids=prompt_ids,
            delivered_ids=list(work.token_ids[work.prompt_tokens :]),
            params=_sampling_params(work.sampling),
            stop_token_ids=frozenset(work.stopping.stop_token_ids),
            min_tokens=work.stopping.min_tokens,
            max_tokens=min(work.stopping.max_tokens, max_context - len(prompt_ids)),
            cache_namespace=work.cache_namespace,
            cache_read=work.cache_read,
            cache_write=work.cache_write,
            priority=work.priority,
            reserve_worst_case=work.reserve_worst_case,
            deadline=None if time_left is None else time.monotonic() + time_left,
            trace=(work.traceparent, work.tracestate) if work.traceparent else None,
        )


def _sampling_params(sampling: work_pb2.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
    )
