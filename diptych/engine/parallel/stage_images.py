"""Rows of images that a stage of a pipeline takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.batch import SequenceStep, given_embeddings
from diptych.engine.parallel.stages import Stage


def rows_of_stage(
    sequences: Sequence[SequenceStep], stage: Stage, hidden_size: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what `given_embeddings` does, with the columns of a stage: first those that enter it, which mean
    nothing behind the first stage, then those of each of its layers. None where it takes no row.
    """
    return cut_rows(given_embeddings(sequences), stage, hidden_size)


def cut_rows(
    given: tuple[torch.Tensor, torch.Tensor] | None, stage: Stage, hidden_size: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return places and rows of `given_embeddings` as `rows_of_stage` does."""
    if given is None:
        return None
    places, rows = given
    own = rows[:, stage.columns_of_rows(hidden_size)]
    if not stage.is_first and own.shape[1] <= hidden_size:
        return None
    return places, own
