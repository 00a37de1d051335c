"""Logits processor of bad_words: sequences of tokens that must not come (`bad_words_ids` of transformers)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.engine.sampling.logits_processor import History, Scores


class BadWords:
    """Forbids the last token of a sequence wherever the tokens before it are the sequence's others.

    What came before includes the prompt: a word that the prompt begins is not finished. A sequence of one
    token is forbidden always.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = np.asarray(sorted({word[0] for word in words if len(word) == 1}), dtype=np.int64)
        # By the token right before the last: a step looks at the few sequences that could end now.
        self._by_previous: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_previous.setdefault(word[-2], []).append(tuple(word))
        self._longest = max((len(word) for word in words), default=0)

    def apply(self, scores: Scores, history: History) -> None:
        scores[self._always] = -np.inf
        if not self._by_previous:
            return
        before = _tail(history, self._longest - 1)
        for word in self._by_previous.get(before[-1], ()) if before else ():
            if before[1 - len(word) :] == word[:-1]:
                scores[word[-1]] = -np.inf


def _tail(history: History, count: int) -> tuple[int, ...]:
    """Return the last tokens of prompt and output, at most `count`."""
    output = tuple(history.output_ids[-count:])
    missing = count - len(output)
    return (*history.prompt_ids[-missing:], *output) if missing else output
