"""What the engine loop schedules: sequences of one attempt that step together or not at all.

How an attempt decodes is a kind of gang: ordinary choices are gangs of one sequence each (choices.py), a beam
search is one gang of all its live beams (beams.py). The loop knows this file only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any

import torch

from decode_worker.request import DecodeRequest, Outcome
from decode_worker.scheduler import Candidate
from decode_worker.sequence import DecodeSequence
from diptych.engine.sampling import SampleFailure, SampleRow
from diptych.engine.step_output import StepOutput
from diptych.worker.v1 import work_pb2
from diptych.worker_process.logprob_codec import failure_reason

Row = tuple["StepGroup", DecodeSequence]
Picker = Callable[[torch.Tensor, Sequence[Row]], Sequence[Any]]


class StepGroup(ABC):
    """Its rows, and what the gateway is still owed."""

    def __init__(self, request: DecodeRequest, joined: int, choices: Sequence[int]) -> None:
        self.request = request
        self.joined = joined
        self.choices = list(choices)
        """What it answers for; the gateway hears one last word on each."""
        self.rows: list[DecodeSequence] = []
        """What the next step computes; none before the handoff and after the end."""
        self.ended = False

    @staticmethod
    def draws(sequence: DecodeSequence) -> Sequence[SampleRow | None]:
        """What a device may draw in place of `pick`, one a row of logits; None: its logits are wanted."""
        return [None] * sequence.logit_rows

    def draftable(self, sequence: DecodeSequence) -> int:
        """How many tokens may be drafted after the one that the next step gives in any case."""
        return 0

    @staticmethod
    @abstractmethod
    def pick(logits: torch.Tensor, rows: Sequence[Row]) -> Sequence[Any]:
        """On the engine's thread: what is made of logits `[rows of logits, vocab]`, all those of each row."""

    @abstractmethod
    def start(self, first_tokens: Sequence[work_pb2.SampledToken]) -> Outcome | None:
        """The handoff is complete. The gateway hears of what that gives; an outcome means it is over."""

    @abstractmethod
    def take(self, picked: Sequence[Any]) -> Outcome | None:
        """As `start`, with the step's results: of each row a list of what `pick` gave, or a SampleFailure."""

    @abstractmethod
    def candidate(self, unknown: int = 0) -> Candidate:
        """What the planner has to know. `unknown` tokens of each row are still being computed."""

    def goes_on(self, unknown: int) -> bool:
        """Whether it will have a next step for all that is known before `unknown` tokens are."""
        return True

    def make_room(self, unknown: int = 0) -> None:
        """Give every row the block that its next token is written to. OutOfBlocks if the pool cannot."""
        for row in self.rows:
            self.request.blocks.make_room(row, unknown)

    def forgo(self, choices: Collection[int]) -> bool:
        """Nobody wants these any more; whether nothing is wanted at all. None named means all."""
        self.choices = [choice for choice in self.choices if choices and choice not in choices]
        return not self.choices

    def release(self) -> None:
        """Give up the blocks of all rows. No step may be writing them."""
        rows, self.rows = self.rows, []
        self.request.blocks.release(rows)

    # ---- last words ----------------------------------------------------------------------------------

    def say_preempted(self) -> None:
        request = self.request
        for choice in self.choices:
            request.gateway.preempted(request.key, choice, request.times_now())

    def say_failed(self, reason: int, message: str) -> None:
        request = self.request
        for choice in self.choices:
            request.gateway.failed(request.key, choice, reason, message, request.times_now())

    def failed(self, failure: SampleFailure) -> Outcome:
        """A row has no token to give."""
        if not failure.by_request:
            self.request.blocks.distrust(self.rows)
        self.say_failed(failure_reason(failure), failure.reason)
        return "failed"


def pick_all(drawn: StepOutput, rows: Sequence[Row]) -> Sequence[list[Any]]:
    """What each row makes of a step: the tokens drawn for it, else of its logits; one kind together."""
    if len(drawn.tokens) == len(rows) and None not in drawn.tokens:
        return [[token] for token in drawn.tokens]  # most steps of most servers
    picked: list[list[Any]] = []
    left: dict[Picker, list[tuple[int, range]]] = {}  # rows by number, and where their logits are
    begin = undrawn = 0
    for number, (gang, sequence) in enumerate(rows):
        end = begin + sequence.logit_rows
        picked.append(list(drawn.tokens[begin:end]))
        if picked[-1][0] is None:  # then all of them
            left.setdefault(gang.pick, []).append((number, range(undrawn, undrawn + end - begin)))
            undrawn += end - begin
        begin = end
    for picker, some in left.items():
        places = [place for _, of_row in some for place in of_row]
        logits = drawn.logits if len(places) == undrawn else drawn.logits[places]
        results = iter(picker(logits, [rows[number] for number, _ in some]))
        for number, of_row in some:
            picked[number] = list(islice(results, len(of_row)))
    return picked
