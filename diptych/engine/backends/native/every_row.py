"""Steps whose tokens all get a hidden row: the native step computes such rows where logits are wanted.

A row of logits more costs a row of the output matrix. Its logits are never kept: the row is greedy, and the
token that it is likeliest to give is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diptych.engine.batch import SequenceStep, StepOutput
from diptych.engine.sampling import SampleRow, SamplingParams

_DROPPED = SampleRow(SamplingParams(temperature=0.0), (), ())


@dataclass(frozen=True)
class WideStep:
    """A step with a row of logits for each of its tokens."""

    sequences: Sequence[SequenceStep]
    draws: Sequence[SampleRow | None]
    """Sampling of the row of each token."""
    asked: Sequence[int]
    """Places of the rows that were asked for, in their order."""


def with_every_row(sequences: Sequence[SequenceStep], draws: Sequence[SampleRow | None]) -> WideStep:
    """Return the step of `sequences` with a row of logits for each token; `draws` has one for each row that
    is asked for.
    """
    wide: list[SequenceStep] = []
    rows: list[SampleRow | None] = []
    asked: list[int] = []
    begin = 0
    for step in sequences:
        tokens, end = len(step.token_ids), begin + step.logit_rows
        rows += [_DROPPED] * (tokens - step.logit_rows)
        asked += range(len(rows), len(rows) + step.logit_rows)
        rows += draws[begin:end]
        wide.append(replace(step, wants_logits=True, trailing=tokens))
        begin = end
    return WideStep(wide, rows, asked)


def has_every_row(sequences: Sequence[SequenceStep]) -> bool:
    """Return whether logits are wanted after each token of a step."""
    return all(step.logit_rows == len(step.token_ids) for step in sequences)


def is_dropped(draw: SampleRow | None) -> bool:
    """Return whether a row is there for its hidden row alone."""
    return draw is _DROPPED


def compute_every_row(
    sequences: Sequence[SequenceStep],
    draws: Sequence[SampleRow | None],
    compute: Callable[[Sequence[SequenceStep], Sequence[SampleRow | None]], StepOutput],
) -> StepOutput:
    """Return the output of a step that `compute` computes with a hidden row for each token: what was asked
    for, and all these rows as features.
    """
    wide = with_every_row(sequences, draws)
    output = compute(wide.sequences, wide.draws)
    assert output.hidden is not None
    tokens = [output.tokens[row] for row in wide.asked]
    return replace(output, tokens=tokens, hidden=output.hidden[list(wide.asked)])
