"""The recurrent states of one step: read from pages as layers ask, written once all layers are computed.

A step that is aborted or fails writes nothing, so that it can be computed again: states are not what they
were once a token was added to them. The count of tokens that a page has (state_layout.py) is compared with
the place where a sequence goes on: wrong states, or those that have the step's tokens already, make no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from diptych.engine.backends.torch.recurrent.adapted import AdaptedRecurrence, Advance
from diptych.engine.backends.torch.recurrent.layer import RecurrentLayer, States
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.state_layout import StatePages
from diptych.engine.state_cuts import page_before, state_cuts


@dataclass(frozen=True)
class _Piece:
    """Tokens of a run up to a place's end, or to the run's."""

    tokens: slice
    """Tokens of each sequence, counted from the step's first."""
    pages: torch.Tensor | None
    """Pages `[sequences, n]` that get the states behind them; None: none is kept."""
    counts: torch.Tensor
    """Tokens behind which these states are, int64 `[sequences]`."""


@dataclass
class _Run:
    """Sequences of as many tokens each that are advanced together."""

    pages: StatePages
    members: list[int]
    """Numbers of the sequences in the step."""
    rows: torch.Tensor
    """Rows of the step's flat list, `[sequences, tokens]`."""
    read: torch.Tensor | None
    """Pages `[sequences, n]` with the states before; None: these are the first tokens."""
    starts: torch.Tensor
    pieces: list[_Piece]
    kept: list[tuple[int, _Piece, States]] = field(default_factory=list)
    """States to write, with the layer's number."""

    def states(self, layer: int, shapes: Sequence[tuple[int, ...]]) -> States:
        """Return the states of a layer before the run."""
        if self.read is not None:
            return self.pages.states(layer, self.read)
        size = len(self.members)
        return tuple(torch.zeros(size, *shape, device=self.rows.device) for shape in shapes)

    def stale(self) -> list[bool]:
        """Return for each sequence whether the states that it reads are not those before it."""
        if self.read is None:
            return [False] * len(self.members)
        found: list[bool] = (self.pages.counts(self.read) != self.starts).tolist()
        return found

    def write(self, numbers: Sequence[int]) -> None:
        """Write what was kept of the run's sequences number `numbers`."""
        everyone = len(numbers) == len(self.members)
        chosen = (
            slice(None) if everyone else torch.tensor(numbers, dtype=torch.int64, device=self.rows.device)
        )
        for layer, piece, states in self.kept:
            if piece.pages is not None:
                own = [state[chosen] for state in states]
                self.pages.set_states(layer, piece.pages[chosen], own)
        for piece in self.pieces:
            if piece.pages is not None:
                self.pages.set_counts(piece.pages[chosen], piece.counts[chosen])


class StepStates:
    """States of the sequences of one step, whose layouts are equal and have pages."""

    def __init__(self, sequences: Sequence[SequenceStep]) -> None:
        layout = sequences[0].memory.layout
        assert layout.states is not None
        self._shapes = dict(layout.states.layers)
        self._runs = _runs(sequences)
        self._count = len(sequences)

    def advance(self, index: int, layer: RecurrentLayer, mixed_TX: torch.Tensor) -> torch.Tensor:
        """Return `[T, Y]` of layer number `index` for the step's rows (`Recur` in decoder.py)."""
        found = [self._advance_run(run, index, layer, mixed_TX) for run in self._runs]
        out_TY = mixed_TX.new_empty(len(mixed_TX), found[0].shape[-1])
        for run, mixed_BNY in zip(self._runs, found, strict=True):
            out_TY[run.rows.flatten()] = mixed_BNY.flatten(0, 1)
        return out_TY

    def finish(self, abort: AbortWords | None) -> list[int]:
        """Write the states of the step, which is computed, but for aborted sequences; return the numbers of
        those that read states of another count of tokens, for which none are written either.
        """
        wrong: list[int] = []
        for run in self._runs:
            wrong += [member for member, one in zip(run.members, run.stale(), strict=True) if one]
            aborted = {member for member in run.members if abort is not None and abort.is_aborted(member)}
            left_out = {*aborted, *wrong}
            run.write([number for number, member in enumerate(run.members) if member not in left_out])
        return wrong

    def _advance_run(
        self, run: _Run, index: int, layer: RecurrentLayer, mixed_TX: torch.Tensor
    ) -> torch.Tensor:
        rows = run.rows.flatten()
        mixed_BNX = mixed_TX[rows].unflatten(0, tuple(run.rows.shape))
        states = run.states(index, self._shapes[index])
        out = []
        for piece in run.pieces:
            advance: Advance = layer.advance
            if isinstance(layer, AdaptedRecurrence):
                advance = layer.of_rows(run.rows[:, piece.tokens])
            given, states = advance(mixed_BNX[:, piece.tokens], states)
            out.append(given)
            if piece.pages is not None:
                run.kept.append((index, piece, states))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _runs(sequences: Sequence[SequenceStep]) -> list[_Run]:
    """Return the runs of a step: each chunk alone, rows of one token of one memory together."""
    runs: list[_Run] = []
    singles: dict[int, list[tuple[int, int, SequenceStep]]] = {}
    begin = 0
    for number, step in enumerate(sequences):
        if len(step.token_ids) == 1 and step.start:  # a single token is no guess
            singles.setdefault(id(step.memory), []).append((number, begin, step))
        else:
            runs.append(_chunk(number, begin, step))
        begin += len(step.token_ids)
    runs.extend(_rows(found) for found in singles.values())
    return runs


def _pages_of(step: SequenceStep) -> StatePages:
    assert step.memory.layout.states is not None
    return StatePages(step.memory.layout.states, step.memory.blocks)


def _chunk(number: int, begin: int, step: SequenceStep) -> _Run:
    device, start, before = step.memory.device, step.start, page_before(step)
    kept = {cut.end: cut.page for cut in state_cuts(step)}
    # Sums over a chunk are not those of its tokens one by one, as they come without guesses.
    ends = kept if step.settled is None else range(1, len(step.token_ids) + 1)
    pieces, at = [], 0
    for end in ends:
        page, count = kept.get(end), torch.tensor([start + end], device=device)
        pieces.append(
            _Piece(slice(at, end), None if page is None else torch.tensor([page], device=device), count)
        )
        at = end
    read = None if before is None else torch.tensor([before], device=device)
    rows = torch.arange(begin, begin + len(step.token_ids), device=device).unsqueeze(0)
    return _Run(_pages_of(step), [number], rows, read, torch.tensor([start], device=device), pieces)


def _rows(found: Sequence[tuple[int, int, SequenceStep]]) -> _Run:
    steps = [step for _, _, step in found]
    device = steps[0].memory.device
    starts = torch.tensor([step.start for step in steps], device=device)
    read = torch.tensor([page_before(step) for step in steps], device=device)
    written = torch.tensor([state_cuts(step)[0].page for step in steps], device=device)
    rows = torch.tensor([[begin] for _, begin, _ in found], device=device)
    piece = _Piece(slice(0, 1), written, starts + 1)
    return _Run(_pages_of(steps[0]), [number for number, _, _ in found], rows, read, starts, [piece])
