"""Beam search on the decode worker: all live beams are one step group, and the outputs are sent at its end.

diptych/engine/beam_search.py takes the decisions; here beams are rows with blocks. Blocks that a fork shares
with its siblings stay shared until it writes (sequence.py): a search over W beams holds the prompt once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode_worker.request import DecodeRequest, Outcome
from decode_worker.scheduler import Candidate as Planned
from decode_worker.sequence import DecodeSequence
from decode_worker.step_group import Row, StepGroup
from diptych.engine.beam_search import Beam, BeamSearch, Fork, beam_candidates
from diptych.engine.sampling import Candidate, SampleFailure
from diptych.engine.sampling.sample import NOTHING_LEFT
from diptych.worker.v1 import work_pb2
from diptych.worker_process.grammar_masks import GrammarState
from diptych.worker_process.logprob_codec import decode_candidate

_Candidates = list[Candidate] | SampleFailure


class Beams(StepGroup):
    """A beam search; `choices` are the ranks that the gateway wants of its result."""

    def __init__(self, request: DecodeRequest, arrival_order: int, ranks: Sequence[int]) -> None:
        super().__init__(request, arrival_order, ranks)
        attempt = request.attempt
        self._search = BeamSearch(
            attempt.beam_width, stop_ids=attempt.stop_token_ids, max_tokens=attempt.max_tokens
        )

    @staticmethod
    def pick(logits: torch.Tensor, rows: Sequence[Row]) -> Sequence[_Candidates]:
        """Return the tokens that each beam may continue with, from logits `[beams, vocab]`."""
        picked: list[_Candidates] = []
        for number, (group, sequence) in enumerate(rows):
            attempt = group.request.attempt
            picked += beam_candidates(
                logits[number : number + 1],
                [sequence.next_row],
                attempt.beam_width,
                attempt.stop_token_ids,
            )
        return picked

    def start(self, first_tokens: Sequence[work_pb2.SampledToken]) -> Outcome | None:
        attempt = self.request.attempt
        row = attempt.sample_row(attempt.params, [])
        root = DecodeSequence(
            len(attempt.prompt_ids),
            [],
            row,
            self.request.grammar,
            adapter=self.request.adapter_slot,
            shift=attempt.output_shift,
        )
        self.request.blocks.start(root)
        self.rows = [root]
        return self._fork(self._search.first([decode_candidate(token) for token in first_tokens]))

    def take(self, picked: Sequence[Sequence[_Candidates] | SampleFailure]) -> Outcome | None:
        of_beams: list[list[Candidate]] = []
        for results in picked:
            found = results if isinstance(results, SampleFailure) else results[0]
            if not isinstance(found, SampleFailure):
                of_beams.append(found)
            elif found.by_request:
                of_beams.append([])  # the rules end this beam; others may continue
            else:
                return self.failed(found)
        return self._fork(self._search.advance(of_beams))

    def candidate(self, unknown: int = 0) -> Planned:
        growth = self.request.blocks.group_demand(self.rows)
        attempt = self.request.attempt
        rows = len(self.rows)
        return Planned(self.arrival_order, rows, growth, None, attempt.reserve_worst_case, attempt.priority)

    def _fork(self, forks: Sequence[Fork]) -> Outcome | None:
        """Replace the rows by their forks; without any the search has ended."""
        parents = self.rows
        self.rows = list(parents)  # with each child from the moment that it holds blocks
        for fork in forks:
            self.rows.append(self._child(parents[fork.parent], fork.token_id))
        self.rows = self.rows[len(parents) :]
        self.request.blocks.release_parents(parents)
        self.request.decoded += len(forks)
        return None if self.rows else self._deliver()

    def _child(self, parent: DecodeSequence, token_id: int) -> DecodeSequence:
        attempt = self.request.attempt
        output = [*parent.output_ids, token_id]
        grammar = None if parent.grammar is None else parent.grammar.copy()
        if grammar is not None:
            grammar.accept(token_id)
        row = attempt.sample_row(attempt.params, output, grammar)
        child = DecodeSequence(
            len(attempt.prompt_ids), output, row, grammar, adapter=parent.adapter, shift=parent.shift
        )
        self.request.blocks.fork(parent, child)
        return child

    def _deliver(self) -> Outcome:
        """Send each rank's output and terminal message."""
        request, attempt = self.request, self.request.attempt
        best = self._search.result(max(self.choices) + 1)
        if not best:
            return self.failed(NOTHING_LEFT)
        for rank in self.choices:
            beam: Beam = best[rank]
            # If neither its tokens nor its length ended it, its rules did.
            reason = attempt.finish_reason(beam.token_ids[-1], len(beam.token_ids), self._grammar_after(beam))
            reason = reason or work_pb2.FINISH_REASON_STOP
            request.gateway.output(
                request.key, rank, beam.token_ids, beam.scores, reason, request.times_now()
            )
        return "finished"

    def _grammar_after(self, beam: Beam) -> GrammarState | None:
        """Return the grammar's state after a hypothesis, which is no row and has no state of its own."""
        if self.request.grammar is None:
            return None
        grammar = self.request.grammar.copy()
        grammar.follow(beam.token_ids)
        return grammar
