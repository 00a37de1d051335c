"""Prompts that this worker computes itself: conditional disaggregation.

The gateway sends an attempt here and to no prefill worker where few tokens of its prompt are new, or where no
prefill worker is ready. The life of such a prompt:

1. QUEUED    attached; its grammar is being compiled, or other prompts are before it.
2. ASKED     it waits for blocks, in one queue with the asks of prefill workers.
3. GRANTED   chunks of it are computed, a few tokens in each step beside the running sequences, so that none
             of these waits long for its next token.
4. ENDED     committed: from there on it is a handoff as any other. Or stopped: revoked with its attempt, or
             failed.

One with more new tokens than its bound is answered with TOO_MANY_NEW: at once, or with its grant, if blocks
of its prefix were evicted meanwhile. The gateway then sends the next attempt to a prefill worker.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from decode_worker.local_schedule import ChunkBudget, LocalBounds, QueuedPrompt, plan_asks, plan_chunks
from decode_worker.request import DecodeRequest, State
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.window_table import PromptWindow
from diptych.engine.prompt_logprobs import CHUNK
from diptych.engine.sampling import SampleFailure, SampleRow
from diptych.runtime.failpoints import reach
from diptych.worker.v1 import work_pb2
from diptych.worker_process.logprob_codec import failure_reason
from diptych.worker_process.prompt_chunk import Computed, PromptChunk
from kvtransfer.drivers.local_writer import LocalListener
from kvtransfer.drivers.window_grant import split_grant
from kvtransfer.protocol.messages import FirstTokens, GrantRef, Key, SendGrant


class Grants(Protocol):
    """The writer's half of the handoff (kvtransfer.drivers.local_writer.LocalWriter)."""

    listener: LocalListener | None

    def ask(self, key: Key) -> None: ...
    def commit(
        self, ref: GrantRef, num_tokens: int, first_tokens: FirstTokens, times: work_pb2.PhaseTimes
    ) -> None: ...
    def stop(self, ref: GrantRef, reason: int | None = None, message: str = "") -> None: ...


class Phase(enum.Enum):
    """Phase of a prompt, as listed at the head of this file."""

    QUEUED = "queued"
    ASKED = "asked"
    GRANTED = "granted"
    ENDED = "ended"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.ASKED, Phase.ENDED}),
    Phase.ASKED: frozenset({Phase.GRANTED, Phase.ENDED}),
    Phase.GRANTED: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class ChunkRow:
    """A chunk of a prompt as a row of a step (`decode_worker.step_group.StepRow`)."""

    def __init__(self, chunk: PromptChunk) -> None:
        self.chunk = chunk
        self.draft: list[int] = []
        self.sample_rows = chunk.device_rows()
        self._sequence = chunk.sequence()

    @property
    def logit_rows(self) -> int:
        """See `StepRow.logit_rows`."""
        return self._sequence.logit_rows

    def step(self, memory: KVMemory, follows: int | None) -> SequenceStep:
        """See `StepRow.step`; a chunk follows nothing that is unknown."""
        return self._sequence


class LocalPrompt:
    """A prompt that this worker computes, and its progress; owner of the row of its present chunk."""

    def __init__(self, request: DecodeRequest, arrived: int, bound: int, expected: int) -> None:
        """Take a request that was attached as number `arrived`, of whose tokens `expected` seem to be new."""
        self.request = request
        self.token_ids = request.attempt.token_ids
        self.arrived = arrived
        self.bound = bound
        self.expected = expected
        self.phase = Phase.QUEUED
        self.entered: dict[Phase, float] = {Phase.QUEUED: time.monotonic()}
        self.rows: list[ChunkRow] = []
        """The chunk that is being computed, if one is."""
        self.ref: GrantRef | None = None
        self.block_table: list[int] = []
        self.window: PromptWindow | None = None
        self.cached = self.computed = self.steps = 0
        self.revoked = False

    def move(self, to: Phase) -> None:
        """Change the phase. Raises RuntimeError for a transition that is not in TRANSITIONS."""
        if to not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"{self.request.key}: {self.phase.value} → {to.value}")
        self.phase = to
        self.entered[to] = time.monotonic()

    @property
    def remaining(self) -> int:
        """Tokens to compute, those of the present chunk included."""
        return len(self.token_ids) - self.computed if self.ref is not None else self.expected

    @property
    def tokens(self) -> int:
        """Tokens of the present chunk."""
        return sum(row.chunk.tokens for row in self.rows)

    @property
    def entry(self) -> QueuedPrompt:
        """Entry of this prompt for the planner."""
        attempt = self.request.attempt
        limit = None if attempt.prompt_logprobs is None else CHUNK
        return QueuedPrompt(self.arrived, self.remaining, attempt.priority, limit)

    @staticmethod
    def device_rows(row: ChunkRow) -> Sequence[SampleRow | None]:
        """See `RowOwner.device_rows`."""
        return row.sample_rows

    @staticmethod
    def pick(logits: torch.Tensor, rows: Sequence[tuple[LocalPrompt, ChunkRow]]) -> Sequence[Any]:
        """Return, for each chunk, what its rows of logits give, and None for each of its further rows."""
        picked: list[Computed | SampleFailure | None] = []
        for _, row in rows:
            count = row.logit_rows
            begin = len(picked)
            picked.append(row.chunk.from_logits(logits[begin : begin + count]))
            picked += [None] * (count - 1)
        return picked

    def times(self) -> work_pb2.PhaseTimes:
        """Return the phases that a prefill worker would report."""
        asked, granted = self.entered.get(Phase.ASKED), self.entered.get(Phase.GRANTED)
        now = time.monotonic()
        times = work_pb2.PhaseTimes(prefill_steps=self.steps, cached_tokens=self.cached, local_prefill=True)
        times.prefill_queue.FromNanoseconds(_ns((asked or now) - self.entered[Phase.QUEUED]))
        if asked is not None:
            times.grant_wait.FromNanoseconds(_ns((granted or now) - asked))
        if granted is not None:
            times.prefill.FromNanoseconds(_ns(now - granted))
        return times


class LocalPrefills:
    """The prompts that this worker computes, in order of arrival."""

    def __init__(
        self,
        memory: KVMemory,
        grants: Grants,
        bounds: LocalBounds,
        *,
        writes: Callable[[LocalPrompt], bool],
        abort: Callable[[LocalPrompt], None],
        wake: Callable[[], None],
    ) -> None:
        """Compute into `memory` under grants of `grants`.

        `writes` returns whether a step writes the blocks of a prompt, `abort` ends that within a layer, and
        `wake` lets the engine loop plan again.
        """
        self.bounds = bounds
        self.done = 0
        """Prompts that were computed here."""
        self.budget = ChunkBudget(bounds.chunk)
        self._memory = memory
        self._grants = grants
        self._writes = writes
        self._abort = abort
        self._wake = wake
        self._prompts: dict[Key, LocalPrompt] = {}
        self._arrived = 0
        grants.listener = LocalListener(granted=self._granted, revoked=self._revoked)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to compute, including those that may turn out to be cached."""
        return sum(prompt.remaining for prompt in self._prompts.values())

    @property
    def computable(self) -> bool:
        """True if the next step computes a chunk."""
        return any(_computable(prompt) for prompt in self._prompts.values())

    # ---- events --------------------------------------------------------------------------------------

    def add(self, request: DecodeRequest, kind: work_pb2.LocalPrefill, expected: int) -> bool:
        """Queue an attached request; False if more of its tokens are new than its bound, by `expected`."""
        fallback = kind == work_pb2.LOCAL_PREFILL_FALLBACK
        bound = self.bounds.fallback if fallback else self.bounds.short
        if expected > bound:
            return False
        self._arrived += 1
        self._prompts[request.key] = LocalPrompt(request, self._arrived, bound, expected)
        return True

    def ask(self) -> None:
        """Let the prompts that are about to be computed ask for blocks."""
        prompts = self._prompts.values()
        queued = {p.arrived: p for p in prompts if p.phase is Phase.QUEUED and p.request.compiling is None}
        holding = [p.entry for p in prompts if p.phase in (Phase.ASKED, Phase.GRANTED)]
        for arrived in plan_asks([p.entry for p in queued.values()], holding, self.bounds.idle_chunk):
            queued[arrived].move(Phase.ASKED)
            self._grants.ask(queued[arrived].request.key)

    def drop(self, key: Key) -> None:
        """Forget a prompt whose attempt has ended without blocks; one with blocks ends when it is revoked."""
        prompt = self._prompts.get(key)
        if prompt is not None and prompt.ref is None:
            self._end(prompt)

    def _granted(self, grant: SendGrant) -> None:
        ref, cached_tokens = grant.ref, grant.cached_tokens
        prompt = self._prompts.get(ref.key)
        if prompt is None or prompt.phase is not Phase.ASKED:
            self._grants.stop(ref)
            return
        prompt.move(Phase.GRANTED)
        if prompt.request.adapter is not None:
            prompt.request.adapter.retain()  # a step may compute the prompt when its attempt has ended
        prompt.ref = ref
        prompt.block_table, prompt.window = split_grant(
            self._memory.layout, len(prompt.token_ids), grant.block_ids, cached_tokens, grant.window_pins
        )
        prompt.cached = prompt.computed = cached_tokens
        if prompt.remaining > prompt.bound or prompt.request.attempt.needs_images(cached_tokens):
            self._stop(prompt, work_pb2.FAILURE_REASON_TOO_MANY_NEW, "blocks of its prefix were evicted")
            return
        prompt.request.move(State.PREFILLING)
        reach("decode.local_granted")
        self._wake()

    def _revoked(self, ref: GrantRef) -> None:
        prompt = self._prompts.get(ref.key)
        if prompt is None or prompt.ref != ref:
            self._grants.stop(ref)
            return
        prompt.revoked = True
        if self._writes(prompt):
            self._abort(prompt)  # `take` promises that nothing writes any more, after the step
        else:
            self._stop(prompt)

    # ---- steps ---------------------------------------------------------------------------------------

    def plan(self, running: int, slack_s: float = 0.0) -> list[LocalPrompt]:
        """Give prompts their chunks of the next step, beside `running` sequences, and return them.

        `slack_s` is the pause between steps.
        """
        self.ask()
        prompts = {p.arrived: p for p in self._prompts.values() if _computable(p)}
        budget = self.budget.tokens(slack_s) if running else self.bounds.idle_chunk
        planned = plan_chunks([p.entry for p in prompts.values()], budget)
        for arrived, tokens in planned:
            prompts[arrived].rows = [ChunkRow(self._chunk(prompts[arrived], tokens))]
        return [prompts[arrived] for arrived, _ in planned]

    def _chunk(self, prompt: LocalPrompt, tokens: int) -> PromptChunk:
        request = prompt.request
        return PromptChunk(
            request.attempt,
            request.grammar,
            prompt.token_ids,
            self._memory,
            prompt.block_table,
            prompt.computed,
            tokens,
            request.adapter_slot,
            window=prompt.window,
        )

    def take(self, prompt: LocalPrompt, picked: Sequence[Any] | SampleFailure) -> None:
        """Take the result of a chunk's step: commit the last one, or go on."""
        (row,) = prompt.rows
        prompt.rows = []
        if prompt.revoked:
            self._stop(prompt)
            return
        result = _result(row, picked)
        if isinstance(result, SampleFailure):
            self._stop(prompt, failure_reason(result), result.reason)
            return
        request = prompt.request
        if result.prompt_scores:
            request.gateway.prompt_scores(request.key, prompt.computed + 1, result.prompt_scores)
        prompt.computed += row.chunk.tokens
        prompt.steps += 1
        if not row.chunk.last:
            reach("decode.local_chunk")
            return
        reach("decode.local_commit")
        self._commit(prompt, result)

    def _commit(self, prompt: LocalPrompt, result: Computed) -> None:
        ref = _held(prompt)
        self._end(prompt)
        self.done += 1
        self._grants.commit(ref, len(prompt.token_ids), result.first_tokens, prompt.times())

    def _stop(self, prompt: LocalPrompt, reason: int | None = None, message: str = "") -> None:
        ref = _held(prompt)
        self._end(prompt)
        self._grants.stop(ref, reason, message)

    def _end(self, prompt: LocalPrompt) -> None:
        granted = prompt.phase is Phase.GRANTED
        prompt.move(Phase.ENDED)
        del self._prompts[prompt.request.key]
        if granted and prompt.request.adapter is not None:
            prompt.request.adapter.release()
        self._wake()  # another one may ask now


def new_tokens(num_tokens: int, matched_blocks: int, block_size: int) -> int:
    """Return how many tokens have to be computed: at least one, for its logits."""
    return num_tokens - min(matched_blocks, (num_tokens - 1) // block_size) * block_size


def _computable(prompt: LocalPrompt) -> bool:
    return prompt.phase is Phase.GRANTED and not prompt.revoked and not prompt.rows


def _held(prompt: LocalPrompt) -> GrantRef:
    if prompt.ref is None:
        raise RuntimeError(f"{prompt.request.key} has no blocks")
    return prompt.ref


def _result(row: ChunkRow, picked: Sequence[Any] | SampleFailure) -> Computed | SampleFailure:
    """Return what a chunk's rows of logits gave: nothing, a token sampled by the step, or what was picked."""
    if isinstance(picked, SampleFailure):
        return picked
    if not picked:
        return Computed()
    first = picked[0]
    return first if isinstance(first, Computed) else row.chunk.from_token(first)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
