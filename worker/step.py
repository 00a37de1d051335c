"""A step that fails is computed again row by row, so that one bad row ends nobody but itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.batch import AbortWords
from engine.sampling import SampleFailure

Row = TypeVar("Row")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


def compute_rows(
    rows: Sequence[Row],
    abort: AbortWords,
    compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
) -> Sequence[Result | SampleFailure]:
    """The results of `rows`, in order; SampleFailure for a row that raises even when it is alone.

    Computing a row twice is safe: it writes the same keys and values to the same places. Runs on the
    engine's thread; the words of `abort` go on counting for each row.
    """
    try:
        return compute(rows, abort)
    except Exception:
        _log.exception("a step of %d rows failed; each is computed alone", len(rows))
    results: list[Result | SampleFailure] = []
    for number, row in enumerate(rows):
        word = AbortWords(1)
        word.words = abort.words[number : number + 1]  # a view: whoever sets the step's word sets this one
        try:
            results += compute([row], word)
        except Exception as error:
            results.append(SampleFailure(f"step failed: {type(error).__name__}"))
    return results
