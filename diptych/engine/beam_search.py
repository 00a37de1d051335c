"""Beam search over tokens: which beams go on, which hypotheses are kept, when nothing better can come.

Decisions only: the caller computes the model and moves the keys and values. Equal to transformers'
`generate(num_beams=width, do_sample=False)` with its defaults, a length penalty of 1 and early_stopping False
(beam search as in Sutskever et al. 2014; scores normalised by length as in Wu et al. 2016):

- The (1 + number of stop tokens) x width likeliest continuations of all live beams are looked at, so that
  `width` of them do not stop.
- One that stops is kept as a hypothesis if it is among the first `width` of them. Its score is the sum of its
  log-probabilities over its length, the stop token counted; the best `width` hypotheses stay.
- The first `width` that do not stop are the live beams of the next step.
- The search is over when `width` hypotheses are there and the best live beam, taken at its present length, is
  no better than the worst of them, or when `max_tokens` have come: the first `width` continuations are
  hypotheses then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from diptych.engine.sampling import Candidate, SampleFailure, SampleRow, TokenLogprob, candidates


def candidates_wanted(width: int, stop_ids: Collection[int]) -> int:
    """Return how many candidates of each live beam a step has to look at."""
    return max(2, 1 + len(stop_ids)) * width


def deciding(token_ids: Sequence[int], width: int, stop_ids: Collection[int]) -> list[int]:
    """Places of the tokens that decide a step, among those wanted of a beam, likeliest first.

    The first `width` of all beams are among the first `width` of their own, and so are the first `width` that
    do not stop. With a hundred stop tokens thousands are wanted, and these are a few.
    """
    going = 0
    places = []
    for place, token_id in enumerate(token_ids):
        goes_on = token_id not in stop_ids
        if place < width or (goes_on and going < width):
            places.append(place)
        going += goes_on
    return places


def beam_candidates(
    logits: torch.Tensor, rows: Sequence[SampleRow], width: int, stop_ids: frozenset[int]
) -> list[list[Candidate] | SampleFailure]:
    """Return the candidates of each beam that decide the next step.

    Arguments as of `diptych.engine.sampling.candidates`.
    """
    few = partial(deciding, width=width, stop_ids=stop_ids)
    return candidates(logits, rows, candidates_wanted(width, stop_ids), few)


class Fork(NamedTuple):
    """A live beam of the next step."""

    parent: int
    """The beam it continues, by its place among the live ones before."""
    token_id: int


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens so far and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    total: float
    scores: tuple[TokenLogprob | None, ...]
    """Log-probabilities, one a token; None where the candidates came without."""

    def then(self, candidate: Candidate) -> Beam:
        """Return the beam with one token more."""
        return Beam(
            (*self.token_ids, candidate.token_id),
            self.total + candidate.logprob,
            (*self.scores, candidate.score),
        )

    @property
    def normalised(self) -> float:
        """Log-probability per token, by which hypotheses of different lengths are compared."""
        return self.total / len(self.token_ids)


class BeamSearch:
    """State of one beam search.

    Feed `first` with the candidates after the prompt, then `advance` with those of the live beams, until
    `done`; `result` has the answers. Candidates come likeliest first: `candidates_wanted` of each beam, or as
    many as the logits processors allow, or of these the `deciding` ones. Stop tokens that must not come yet
    (min_tokens) are left out of them.
    """

    def __init__(self, width: int, *, stop_ids: Collection[int], max_tokens: int) -> None:
        if width < 1 or max_tokens < 1:
            raise ValueError("a beam search has at least one beam and one token")
        self._width = width
        self._stop_ids = frozenset(stop_ids)
        self._max_tokens = max_tokens
        self._length = 0
        self._live: list[Beam] = [Beam((), 0.0, ())]
        self._hypotheses: list[Beam] = []  # best first

    @property
    def live(self) -> Sequence[Beam]:
        """The beams to be computed next, best first; none when it is over."""
        return self._live

    @property
    def done(self) -> bool:
        return not self._live

    def first(self, candidates: Sequence[Candidate]) -> list[Fork]:
        """Take the first step, from the candidates after the prompt. Every fork's parent is 0."""
        return self.advance([candidates])

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Fork]:
        """Take one step, from the candidates of each live beam; none of a beam that cannot go on.

        Returns the live beams of the next step as forks of those before, best first: at most `width`, and
        none when the search is over.
        """
        if len(candidates) != len(self._live):
            raise ValueError(f"candidates of {len(candidates)} beams, {len(self._live)} are live")
        going: list[tuple[int, Beam]] = []
        for place, (_, parent, candidate) in enumerate(self._ranked(candidates)):
            stops = candidate.token_id in self._stop_ids or self._length + 1 >= self._max_tokens
            if stops and place < self._width:
                self._hypotheses.append(self._live[parent].then(candidate))
            elif not stops and len(going) < self._width:
                going.append((parent, self._live[parent].then(candidate)))
        # Sorting is stable: of equal ones the earlier stays.
        self._hypotheses = sorted(self._hypotheses, key=lambda beam: -beam.normalised)[: self._width]
        if going and not self._may_improve(going[0][1]):
            going = []
        self._length += 1
        self._live = [beam for _, beam in going]
        return [Fork(parent, beam.token_ids[-1]) for parent, beam in going]

    def result(self, count: int) -> list[Beam]:
        """Return the best `count` hypotheses, best first.

        Where the logits processors allow fewer answers than that, the last is repeated; where they allow
        none, the list is empty.
        """
        best = self._hypotheses[:count]
        return best + best[-1:] * (count - len(best))

    def _ranked(self, candidates: Sequence[Sequence[Candidate]]) -> list[tuple[float, int, Candidate]]:
        """Return the likeliest continuations, likeliest first: total, place of the parent, token."""
        ranked = [
            (self._live[parent].total + candidate.logprob, parent, candidate)
            for parent, of_one in enumerate(candidates)
            for candidate in of_one
        ]
        ranked.sort(key=lambda one: -one[0])
        return ranked[: candidates_wanted(self._width, self._stop_ids)]

    def _may_improve(self, best: Beam) -> bool:
        return len(self._hypotheses) < self._width or best.normalised > self._hypotheses[-1].normalised
