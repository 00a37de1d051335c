"""Ordinary decoding: each choice of an attempt is a sequence of its own and streams its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode_worker.request import DecodeRequest, Outcome
from decode_worker.scheduler import Candidate
from decode_worker.sequence import DecodeSequence
from decode_worker.step_group import Row, StepGroup
from diptych.engine.batch import can_sample_on_device
from diptych.engine.sampling import Sampled, SampleFailure, SampleRow, sample
from diptych.worker.v1 import work_pb2
from diptych.worker_process.logprob_codec import decode_sampled

NOT_SAMPLED = SampleFailure("it follows a wrong draft")
"""Result of a row that nothing depends on."""


class Choice(StepGroup):
    """A choice; `place` is the index of its first token among those of the handoff."""

    def __init__(self, request: DecodeRequest, arrival_order: int, choice: int, place: int) -> None:
        super().__init__(request, arrival_order, [choice])
        self._choice = choice
        self._place = place

    @staticmethod
    def device_rows(sequence: DecodeSequence) -> Sequence[SampleRow | None]:
        """Return its rows, unless rules, a mask or log-probabilities need the logits."""
        if not sequence.draft:
            return (can_sample_on_device(sequence.next_row),)
        return [can_sample_on_device(row) for row in sequence.sample_rows()]

    def max_draft(self, sequence: DecodeSequence) -> int:
        """Return the number of tokens still to come after the next one."""
        return self.request.attempt.max_tokens - len(sequence.output_ids) - 1

    @staticmethod
    def pick(logits: torch.Tensor, rows: Sequence[Row]) -> Sequence[Sampled | SampleFailure]:
        """Return one token for each row of logits `[rows of logits, vocab]`.

        After a wrong draft of a row with rules no mask is made any more: what follows it is not looked at.
        """
        if not any(sequence.draft and sequence.next_row.ruled for _, sequence in rows):
            return sample(logits, [row for _, sequence in rows for row in sequence.sample_rows()])
        picked: list[Sampled | SampleFailure] = []
        for _, sequence in rows:
            begin, at, sample_rows = len(picked), 0, sequence.sample_rows()
            picked += [NOT_SAMPLED] * len(sample_rows)
            following: int | None = 0
            while following is not None:
                at = following
                (sampled,) = sample(logits[begin + at : begin + at + 1], [sample_rows[at]])
                picked[begin + at] = sampled
                following = _following(sequence, at, sampled)
        return picked

    def start(self, first_tokens: Sequence[work_pb2.SampledToken]) -> Outcome | None:
        """Begin after the handoff; the first token is sent before any step."""
        request, attempt = self.request, self.request.attempt
        output = list(attempt.delivered_ids)
        grammar = None if request.grammar is None else request.grammar.copy()
        row = attempt.sample_row(attempt.choices[self._choice], output, grammar)
        sequence = DecodeSequence(
            len(attempt.prompt_ids),
            output,
            row,
            grammar,
            attempt=attempt,
            adapter=request.adapter_slot,
            shift=attempt.output_shift,
        )
        request.blocks.start(sequence)
        self.rows = [sequence]
        if output and (reason := attempt.finish_reason(output[-1], len(output), grammar)) is not None:
            # A client that resumes has the last token already; only the terminal message was lost.
            return self._finished(reason)
        return self._accept(decode_sampled(first_tokens[self._place]), request.times_now())

    def take(self, picked: Sequence[Sequence[Sampled | SampleFailure] | SampleFailure]) -> Outcome | None:
        (found,) = picked
        if isinstance(found, SampleFailure):
            return self.failed(found)
        if self.rows[0].lanes:
            return self._take_drafted(found)
        (sampled,) = found
        self.rows[0].keep_rows((0,))
        self.request.blocks.count_behind(self.rows[0], 0)
        return self.failed(sampled) if isinstance(sampled, SampleFailure) else self._accept(sampled)

    def _take_drafted(self, found: Sequence[Sampled | SampleFailure]) -> Outcome | None:
        """Accept tokens as long as each equals the drafted one that the next was computed after."""
        sequence = self.rows[0]
        right = [0]
        while (row := _following(sequence, right[-1], found[right[-1]])) is not None:
            right.append(row)
        self.request.drafted += len(sequence.draft)
        self.request.blocks.compact_lanes(sequence, right)
        sequence.keep_rows(right)
        sequence.draft, sequence.draft_parents, sequence.draft_rows, sequence.lanes = [], [], [], 0
        for place, row in enumerate(right):
            sampled = found[row]
            if isinstance(sampled, SampleFailure):
                return self.failed(sampled)
            self.request.blocks.count_behind(sequence, place)
            outcome = self._accept(sampled)
            self.request.accepted += place + 1 < len(right)
            if outcome is not None:
                return outcome
        if sequence.draft_computed is not None:  # what was computed after a wrong token is no good
            sequence.draft_computed = min(sequence.draft_computed, sequence.num_tokens - 1)
        self.request.blocks.return_lanes(sequence)
        return None

    def continues(self, unknown: int) -> bool:
        return len(self.rows[0].output_ids) + unknown < self.request.attempt.max_tokens

    def candidate(self, unknown: int = 0) -> Candidate:
        request, attempt = self.request, self.request.attempt
        growth, shared = request.blocks.demand(self.rows[0], unknown)
        return Candidate(
            self.arrival_order,
            1,
            growth,
            shared,
            attempt.reserve_worst_case,
            attempt.priority,
            request.blocks.place_blocks,
        )

    def _accept(self, sampled: Sampled, times: work_pb2.PhaseTimes | None = None) -> Outcome | None:
        """Append a token, send it, and end the choice if the token ends it."""
        request, sequence = self.request, self.rows[0]
        output, token_id = sequence.output_ids, sampled.token_id
        output.append(token_id)
        request.decoded += 1
        request.gateway.token(request.wire_id, self._choice, len(output) - 1, sampled, times)
        request.blocks.publish(sequence)
        grammar = sequence.grammar
        dormant = grammar is not None and grammar.dormant
        if grammar is not None:
            grammar.accept(token_id)
        if (reason := request.attempt.finish_reason(token_id, len(output), grammar)) is not None:
            return self._finished(reason)
        woke = grammar is not None and grammar.dormant is not dormant  # or fell asleep: reasoning began
        if woke or len(output) == request.attempt.min_tokens:
            sequence.next_row = request.attempt.sample_row(sequence.next_row.params, output, grammar)
        return None

    def _finished(self, reason: work_pb2.FinishReason) -> Outcome:
        request = self.request
        request.gateway.finished(request.key, self._choice, reason, request.times_now())
        return "finished"


def _following(sequence: DecodeSequence, row: int, sampled: Sampled | SampleFailure) -> int | None:
    """Return the row of logits after the drafted token that `sampled`, of `row`, shows to be right."""
    return None if isinstance(sampled, SampleFailure) else sequence.drafted_row(row, sampled.token_id)
