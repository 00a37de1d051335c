"""Lengths of drafts, by measured acceptance and measured times. Pure.

With a drafted token right as often as `rate`, a step of k drafts gives 1 + rate + ... + rate^k tokens
(Leviathan et al., 2023, section 3.1), and takes as long as steps of so many rows have taken, and as the
drafts took. The length with the most tokens a second is drafted; none where a step without drafts has more.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

KEPT = 9
"""Times of a step of one size that are kept: their median counts."""
PLAIN_EVERY = 64
"""Drafted steps after which one without drafts is due, to be timed again."""
FIRST_RATE, FIRST_WEIGHT = 0.7, 2.0
"""Rate that is assumed of a drafter at first, and the number of tokens that this counts for."""
DECAY = 0.9
"""Share of what was seen that counts on after each draft: texts change their character."""


class StepCosts:
    """Times of steps by their rows, and of drafted tokens."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = {}
        self._drafts: dict[str, deque[float]] = {}
        self._since_plain = 0

    def record_step(self, rows: int, seconds: float, *, plain: bool) -> None:
        """Record a step of `rows` rows of logits; `plain`: none of them was drafted."""
        self._steps.setdefault(rows, deque(maxlen=KEPT)).append(seconds)
        self._since_plain = 0 if plain else self._since_plain + 1

    def record_draft(self, drafter: str, tokens: int, seconds: float) -> None:
        """Record that `drafter` took so long for `tokens` tokens, one after the other."""
        if tokens:
            self._drafts.setdefault(drafter, deque(maxlen=KEPT)).append(seconds / tokens)

    @property
    def wants_plain(self) -> bool:
        """True if a step without drafts has to be timed."""
        return not self._steps or self._since_plain >= PLAIN_EVERY

    def cost(self, drafter: str, sequences: int, count: int) -> float:
        """Return the time of a step with `count` drafts for each of `sequences`, in steps without drafts."""
        plain = self._step(sequences)
        if not plain:
            return 1.0
        drafting = statistics.median(self._drafts[drafter]) if drafter in self._drafts else 0.0
        return max(self._step(sequences * (1 + count)) / plain, 1.0) + count * drafting / plain

    def _step(self, rows: int) -> float:
        """Return the time of a step of `rows` rows, between those of the nearest sizes that are known."""
        if not self._steps:
            return 0.0
        below = max((known for known in self._steps if known <= rows), default=None)
        above = min((known for known in self._steps if known >= rows), default=None)
        low, high = (None if at is None else statistics.median(self._steps[at]) for at in (below, above))
        if low is None or high is None or below is None or above is None or below == above:
            return low if low is not None else high or 0.0
        return low + (high - low) * (rows - below) / (above - below)


class Acceptance:
    """The share of right tokens among those that one drafter drafts for one sequence."""

    def __init__(self) -> None:
        self._right, self._seen = FIRST_RATE * FIRST_WEIGHT, FIRST_WEIGHT

    @property
    def rate(self) -> float:
        """Share of right tokens among those that followed right ones."""
        return self._right / self._seen

    def record(self, drafted: int, right: int) -> None:
        """Record a draft of `drafted` tokens, the first `right` of which were right."""
        self._right = DECAY * self._right + right
        self._seen = DECAY * self._seen + min(right + 1, drafted)


def best_length(
    rate: float,
    most: int,
    costs: StepCosts,
    drafter: str,
    sequences: int,
    depths: Sequence[int] | None = None,
) -> tuple[int, float]:
    """Return the length that pays most, and its tokens in a plain step's time; (0, 1.0) if none pays.

    `depths` are those of trees of one token, of two, and so on, at most as many as there are: so many tokens
    may be right. None: drafts are chains.
    """
    best = 0, 1.0
    of_count = range(1, most + 1) if depths is None else depths[:most]
    for count, depth in enumerate(of_count, start=1):
        tokens = sum(rate**place for place in range(depth + 1))
        gain = tokens / costs.cost(drafter, sequences, count)
        if gain > best[1]:
            best = count, gain
    return best
