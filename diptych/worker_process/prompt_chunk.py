"""A chunk of a prompt in an engine step: its rows, and first tokens and log-probabilities from its logits.

Prefill workers compute prompts in chunks, and decode workers those with few new tokens; both do it here, so
that a prompt's tokens do not depend on the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.engine.batch import EmbeddingRows, SequenceStep, can_sample_on_device
from diptych.engine.beam_search import beam_candidates
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.window_table import PromptWindow
from diptych.engine.sampling import Sampled, SampleFailure, SampleRow, sample, token_logprobs
from diptych.runtime.image_positions import grid_positions, position_shift
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.grammar_masks import GrammarState
from diptych.worker_process.logprob_codec import encode_candidate, encode_logprob, encode_sampled

FirstTokens = tuple[work_pb2.SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of a chunk beside keys and values."""

    first_tokens: FirstTokens = ()
    """First tokens, with the last chunk: one for each choice, in their order, or those of a beam search."""
    prompt_scores: tuple[work_pb2.Score, ...] = ()
    """Log-probabilities of the tokens that follow the chunk's own: the first is at position start + 1."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunk:
    """Tokens `start` to `start + tokens` of an attempt's `token_ids`, computed into `block_table`."""

    attempt: Attempt
    grammar: GrammarState | None
    token_ids: Sequence[int]
    memory: KVMemory
    block_table: Sequence[int]
    start: int
    tokens: int
    adapter: int | None
    """Slot of the attempt's adapter; None: the base model."""
    embeddings: Sequence[EmbeddingRows] = ()
    """Embeddings of those of its tokens that stand for an image."""
    window: PromptWindow | None = None
    """Blocks of layers with a window, where these have blocks of their own."""

    @property
    def last(self) -> bool:
        """True if its last row of logits gives the first tokens."""
        return self.start + self.tokens == len(self.token_ids)

    @property
    def tokens_to_score(self) -> int:
        """The number of the prompt's tokens that get a log-probability from the logits of this chunk."""
        if self.attempt.prompt_logprobs is None:
            return 0
        following = len(self.attempt.prompt_ids) - 1 - self.start
        return max(0, min(self.tokens, following))

    def sequence(self) -> SequenceStep:
        """Return its share of a step."""
        first, tables = self._window_tables()
        scored, images = self.tokens_to_score > 0, self.attempt.images
        grid = grid_positions(images, self.start, self.tokens) if images else None
        return SequenceStep(
            memory=self.memory,
            block_table=self.block_table,
            start=self.start,
            token_ids=self.token_ids[self.start : self.start + self.tokens],
            wants_logits=self.last or scored,
            trailing=self.tokens if scored else 1,
            adapter=self.adapter,
            embeddings=self.embeddings,
            shift=position_shift(images, self.start) if images and grid is None else 0,
            grid=grid,
            window_tables=tables,
            window_first=first,
        )

    def _window_tables(self) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Return the first place that the chunk reads of its windowed blocks, and their tables from there."""
        layout = self.memory.layout
        if self.window is None or layout.windows is None:
            return 0, ()
        first = layout.windows.first_read(self.start, layout.block_size)
        end = layout.blocks_for(self.start + self.tokens)
        return first, self.window.tables_of(first, end, wraps=layout.states is not None)

    def device_rows(self) -> Sequence[SampleRow | None]:
        """Return, for each row of logits, how a device may sample its token; None: the host needs the logits.

        A device may sample the prompt's last row, if all choices sample alike and ask for nothing else.
        """
        attempt = self.attempt
        rows = self.tokens if self.tokens_to_score else int(self.last)
        if rows != 1 or not self.last or attempt.beam_width or self.tokens_to_score:
            return [None] * rows
        params, *others = attempt.choices.values()
        if any(other is not params for other in others):
            return [None]
        return [can_sample_on_device(attempt.sample_row(params, attempt.delivered_ids, self.grammar))]

    def from_token(self, token: Sampled | SampleFailure) -> Computed | SampleFailure:
        """Return the results of the last chunk, whose first token was sampled by the step."""
        if isinstance(token, SampleFailure):
            return token
        return Computed((encode_sampled(token),) * len(self.attempt.choices))

    def from_logits(self, logits: torch.Tensor) -> Computed | SampleFailure:
        """Return the results from the chunk's own rows of logits `[logit_rows, vocab]`."""
        scores: tuple[work_pb2.Score, ...] = ()
        if count := self.tokens_to_score:
            following = self.token_ids[self.start + 1 : self.start + 1 + count]
            try:
                scored = token_logprobs(logits, following, self.attempt.prompt_logprobs or 0)
            except ValueError as error:
                return SampleFailure(str(error))
            scores = tuple(encode_logprob(score) for score in scored)
        if not self.last:
            return Computed(prompt_scores=scores)
        pick = self._beam_candidates if self.attempt.beam_width else self._first_tokens
        first = pick(logits[-1:])
        return first if isinstance(first, SampleFailure) else Computed(first, scores)

    def _first_tokens(self, logits: torch.Tensor) -> FirstTokens | SampleFailure:
        """Return one token for each choice; choices that sample alike get the same one."""
        attempt = self.attempt
        tokens: dict[int, work_pb2.SampledToken] = {}
        for params in attempt.choices.values():
            if id(params) in tokens:
                continue
            (sampled,) = sample(logits, [attempt.sample_row(params, attempt.delivered_ids, self.grammar)])
            if isinstance(sampled, SampleFailure):
                return sampled
            tokens[id(params)] = encode_sampled(sampled)
        return tuple(tokens[id(params)] for params in attempt.choices.values())

    def _beam_candidates(self, logits: torch.Tensor) -> FirstTokens | SampleFailure:
        attempt = self.attempt
        row = attempt.sample_row(attempt.params, attempt.delivered_ids, self.grammar)
        (found,) = beam_candidates(logits, [row], attempt.beam_width, attempt.stop_token_ids)
        return found if isinstance(found, SampleFailure) else tuple(map(encode_candidate, found))
