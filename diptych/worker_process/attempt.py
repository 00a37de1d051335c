"""An attempt at a request, as both workers read it from the gateway's `Work`.

Token ids only: no text, no tenant. An attempt that follows a preemption brings the tokens that the
client already has; they are output, not prompt, so that penalties, limits and the counter of random
numbers continue where they stopped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diptych.engine.sampling import SampleRow, SamplingParams, choice_seed
from diptych.parameters import SAMPLING_NUMBERS
from diptych.runtime.image_positions import position_shift
from diptych.runtime.image_rows import ImageRows, last_image_position
from diptych.worker.v1 import work_pb2
from diptych.worker_process.grammar_masks import GrammarState
from kvtransfer.protocol.messages import Key


@dataclass(frozen=True, slots=True)
class Attempt:
    """The parameters of an attempt; `deadline` is on this process's `time.monotonic()`."""

    key: Key
    prompt_ids: list[int]
    delivered_ids: list[int]
    choices: Mapping[int, SamplingParams]
    """Sampling parameters of each choice, in the order in which the gateway named them."""
    beam_width: int
    """0 = no beam search; else `choices` are the ranks to be delivered."""
    prompt_logprobs: int | None
    """None: no log-probabilities of the prompt. Else the number of alternatives in each."""
    grammar: work_pb2.Grammar | None
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
    images: tuple[ImageRows, ...] = ()
    """Tokens of the prompt whose embeddings come from images, in order."""
    adapter: bytes = b""
    """Digest of the LoRA adapter's content; empty: the base model."""

    @property
    def token_ids(self) -> list[int]:
        """Tokens that have to be prefilled."""
        return self.prompt_ids + self.delivered_ids

    def needs_images(self, computed: int) -> bool:
        """Return whether rows of images come after the first `computed` tokens."""
        return bool(self.images) and last_image_position(self.images) > computed

    @property
    def output_shift(self) -> int:
        """Return what is added to the places of output tokens for their positions (image_positions.py)."""
        return position_shift(self.images, len(self.prompt_ids)) if self.images else 0

    @property
    def prefill_span(self) -> str:
        """Key of the prefill worker's span; the decode worker's links to it."""
        return f"prefill/{self.key[1]}"

    @property
    def decode_span(self) -> str:
        return f"decode/{self.key[1]}"

    @property
    def params(self) -> SamplingParams:
        """Parameters that all choices have in common: those of the first."""
        return next(iter(self.choices.values()))

    def sample_row(
        self, params: SamplingParams, output_ids: Sequence[int], grammar: GrammarState | None = None
    ) -> SampleRow:
        """Return what the next token after `output_ids` depends on; below min_tokens no stop token may come.

        A complete output ends however short it is: a grammar then allows nothing but a stop token. One that
        its grammar has not begun to hold for does not end.
        """
        too_short = len(output_ids) < self.min_tokens and not (grammar is not None and grammar.complete)
        dormant = grammar is not None and grammar.dormant
        held_back = tuple(self.stop_token_ids) if too_short or dormant else ()
        return SampleRow(params, self.prompt_ids, output_ids, held_back, grammar)

    def finish_reason(
        self, token_id: int, count: int, grammar: GrammarState | None
    ) -> work_pb2.FinishReason | None:
        """Return why `token_id`, the output's token number `count`, ends it; None if it does not.

        `grammar` is the state after it: a complete output was not cut off, however long it is.
        """
        if token_id in self.stop_token_ids or (grammar is not None and grammar.complete):
            return work_pb2.FINISH_REASON_STOP
        if count >= self.max_tokens:
            return work_pb2.FINISH_REASON_LENGTH
        return None

    @classmethod
    def from_work(cls, work: work_pb2.Work, *, max_context: int) -> Attempt:
        """Return the attempt of a message; `max_tokens` is cut where the model's context ends."""
        prompt_ids = list(work.token_ids[: work.prompt_tokens])
        time_left = work.time_left.ToTimedelta().total_seconds() if work.HasField("time_left") else None
        return cls(
            key=(work.id.request_id, work.id.attempt),
            prompt_ids=prompt_ids,
            delivered_ids=list(work.token_ids[work.prompt_tokens :]),
            choices=_choices(work),
            beam_width=work.sampling.beam_width,
            prompt_logprobs=work.prompt_logprobs if work.HasField("prompt_logprobs") else None,
            grammar=work.sampling.grammar if work.sampling.HasField("grammar") else None,
            stop_token_ids=frozenset(work.stopping.stop_token_ids),
            min_tokens=work.stopping.min_tokens,
            max_tokens=min(work.stopping.max_tokens, max_context - len(prompt_ids)),
            cache_namespace=work.cache_namespace,
            # Cached tokens are not computed, and have no logits.
            cache_read=work.cache_read and not work.HasField("prompt_logprobs"),
            cache_write=work.cache_write,
            priority=work.priority,
            reserve_worst_case=work.reserve_worst_case,
            deadline=None if time_left is None else time.monotonic() + time_left,
            trace=(work.traceparent, work.tracestate) if work.traceparent else None,
            images=tuple(map(image_rows, work.images)),
            adapter=work.adapter,
        )


def image_rows(span: work_pb2.ImageSpan) -> ImageRows:
    """Return a span of a message."""
    return ImageRows(span.first_position, span.rows, span.digest, span.first_row, span.columns)


def _choices(work: work_pb2.Work) -> dict[int, SamplingParams]:
    """Return the parameters of each choice, which differ in the seed; equal ones are one object."""
    params = _sampling_params(work.sampling)
    if params.greedy or work.sampling.beam_width:
        return dict.fromkeys(work.choices or (0,), params)
    return {c: replace(params, seed=choice_seed(params.seed, c)) for c in work.choices or (0,)}


def _sampling_params(sampling: work_pb2.Sampling) -> SamplingParams:
    numbers = {name: getattr(sampling, name) for name in SAMPLING_NUMBERS}
    return SamplingParams(
        **numbers,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in sampling.bad_words),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )
