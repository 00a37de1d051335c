"""The rows of steps and their owners: step groups, sequences of one attempt that step together or not at all.

Each way of decoding is a kind of step group: every ordinary choice is a group of one sequence (choices.py), a
beam search is one group of all its live beams (beams.py). The loop knows this file only. Prompts that this
worker computes itself (local_prefill.py) own rows as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, Protocol

import torch

from decode_worker.request import DecodeRequest, Outcome
from decode_worker.scheduler import Candidate
from decode_worker.sequence import DecodeSequence
from diptych.engine.batch import SequenceStep, StepOutput
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.sampling import SampleFailure, SampleRow
from diptych.worker.v1 import work_pb2
from diptych.worker_process.logprob_codec import failure_reason


class StepRow(Protocol):
    """A row of a step: tokens of one sequence."""

    draft: list[int]
    """Drafted tokens of the row; empty for those that have none."""

    @property
    def logit_rows(self) -> int:
        """Rows of logits that it has in a step; 0 for a prompt's chunk before the last one."""
        ...

    def step(self, memory: KVMemory, follows: int | None) -> SequenceStep:
        """Return its share of a step over `memory`, after row `follows` of the step before, if given."""
        ...


class RowOwner(Protocol):
    """The owner of rows of a step."""

    @property
    def request(self) -> DecodeRequest: ...
    @property
    def rows(self) -> Sequence[StepRow]: ...
    def device_rows(self, sequence: Any) -> Sequence[SampleRow | None]:
        """Return how a device may sample, one entry a row of logits; None: `pick` needs the row."""
        ...

    def pick(self, logits: torch.Tensor, rows: Any) -> Sequence[Any]:
        """Return a result for each of `logits`, `[rows of logits, vocab]`, on any thread."""
        ...


Row = tuple["StepGroup", DecodeSequence]
OwnedRow = tuple[RowOwner, StepRow]
Picker = Callable[[torch.Tensor, Any], Sequence[Any]]


class StepGroup(ABC):
    """Rows that step together, and the choices whose results the gateway still waits for."""

    def __init__(self, request: DecodeRequest, arrival_order: int, choices: Sequence[int]) -> None:
        self.request = request
        self.arrival_order = arrival_order
        self.choices = list(choices)
        """Choices that it computes; the gateway gets one terminal message for each."""
        self.rows: list[DecodeSequence] = []
        """Rows of the next step; none before the handoff and after the end."""
        self.ended = False

    @staticmethod
    def device_rows(sequence: DecodeSequence) -> Sequence[SampleRow | None]:
        """Return how a device may sample, one entry a row of logits; None: `pick` needs the row."""
        return [None] * sequence.logit_rows

    def max_draft(self, sequence: DecodeSequence) -> int:
        """Return how many tokens may be drafted after the one that the next step gives in any case."""
        return 0

    @staticmethod
    @abstractmethod
    def pick(logits: torch.Tensor, rows: Sequence[Row]) -> Sequence[Any]:
        """Return a result for each of `logits`, `[rows of logits, vocab]`, on any thread."""

    @abstractmethod
    def start(self, first_tokens: Sequence[work_pb2.SampledToken]) -> Outcome | None:
        """Begin after the handoff and send the first tokens; return an outcome if that ends the group."""

    @abstractmethod
    def take(self, picked: Sequence[Any]) -> Outcome | None:
        """Take the results of a step, as `start` takes first tokens: for each row a list of what `pick`
        returned, or a SampleFailure.
        """

    @abstractmethod
    def candidate(self, unknown: int = 0) -> Candidate:
        """Return the group's entry for the planner. `unknown` tokens of each row are still being computed."""

    def continues(self, unknown: int) -> bool:
        """Return whether a next step is possible after `unknown` tokens that are still being computed."""
        return True

    def ensure_blocks(self, unknown: int = 0) -> None:
        """Give every row the block that its next token is written to. Raises OutOfBlocks."""
        for row in self.rows:
            self.request.blocks.ensure_block(row, unknown)

    def drop_choices(self, choices: Collection[int]) -> bool:
        """Drop cancelled choices (none named: all); return whether none is left."""
        self.choices = [choice for choice in self.choices if choices and choice not in choices]
        return not self.choices

    def release(self) -> None:
        """Release the blocks of all rows. No step may be writing them."""
        rows, self.rows = self.rows, []
        self.request.blocks.release(rows)

    # ---- terminal messages ---------------------------------------------------------------------------

    def send_preempted(self) -> None:
        request = self.request
        for choice in self.choices:
            request.gateway.preempted(request.key, choice, request.times_now())

    def send_failed(self, reason: int, message: str) -> None:
        request = self.request
        for choice in self.choices:
            request.gateway.failed(request.key, choice, reason, message, request.times_now())

    def failed(self, failure: SampleFailure) -> Outcome:
        """Fail for a row without a token; distrust its blocks, unless the request's own rules are why."""
        if not failure.by_request:
            self.request.blocks.distrust(self.rows)
        self.send_failed(failure_reason(failure), failure.reason)
        return "failed"


def pick_all(output: StepOutput, rows: Sequence[OwnedRow]) -> Sequence[list[Any]]:
    """Return the results of each row of a step: tokens sampled on the device, else picked from its logits.

    Rows of one kind of step group are picked together.
    """
    if len(output.tokens) == len(rows) and None not in output.tokens and _one_each(rows):
        return [[token] for token in output.tokens]  # most steps of most servers
    picked: list[list[Any]] = []
    left: dict[Picker, list[tuple[int, range]]] = {}  # rows by number, and the places of their logits
    begin = unsampled = 0
    for number, (group, sequence) in enumerate(rows):
        end = begin + sequence.logit_rows
        picked.append(list(output.tokens[begin:end]))
        if begin < end and picked[-1][0] is None:  # then all of them
            left.setdefault(group.pick, []).append((number, range(unsampled, unsampled + end - begin)))
            unsampled += end - begin
        begin = end
    for picker, some in left.items():
        places = [place for _, of_row in some for place in of_row]
        logits = output.logits if len(places) == unsampled else output.logits[places]
        results = iter(picker(logits, [rows[number] for number, _ in some]))
        for number, of_row in some:
            picked[number] = list(islice(results, len(of_row)))
    return picked


def keep_hidden_rows(output: StepOutput, rows: Sequence[OwnedRow], sequences: Sequence[SequenceStep]) -> None:
    """Let each decoding sequence have its hidden rows and features of a step, if the step gave them.

    `sequences` are the shares of `rows`.
    """
    if output.hidden is None and output.features is None:
        return
    begin = token = 0
    for (_, row), step in zip(rows, sequences, strict=True):
        end, next_token = begin + row.logit_rows, token + len(step.token_ids)
        if isinstance(row, DecodeSequence):
            row.hidden = None if output.hidden is None else output.hidden[begin:end]
            row.step_features = None if output.features is None else output.features[token:next_token]
        begin, token = end, next_token


def _one_each(rows: Sequence[OwnedRow]) -> bool:
    """Return whether each row has one row of logits."""
    return all(sequence.logit_rows == 1 for _, sequence in rows)
