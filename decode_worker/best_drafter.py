"""The choice between drafters, for each sequence by how often their tokens were right there.

Before each draft the last one is compared with what came. Of the drafters that have tokens to offer, the one
that promises most tokens a second (draft_lengths.py) drafts, as many tokens as pay. Where none pays the
sequence rests, longer each time, and steps are launched ahead again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from decode_worker.draft_lengths import Acceptance, StepCosts, best_length
from decode_worker.draft_tree import Draft, DraftTree, as_tree, right_tokens, tree_depth
from decode_worker.sequence import DecodeSequence

if TYPE_CHECKING:
    from decode_worker.speculation import Drafter

FIRST_REST, LONGEST_REST = 8, 48
"""Tokens without drafts after none of the drafters paid; doubled each time. A draft model catches up on so
many in one step (`decode_worker.sequence.MOST_BEHIND`).
"""


@dataclass(eq=False)
class _History:
    """Drafts of a sequence, and how often they were right."""

    accepted: dict[str, Acceptance]
    drafter: str = ""
    draft: Draft = ()
    at: int = 0
    """Tokens of the output when `draft` was made."""
    rest: int = FIRST_REST
    rests_until: int = 0

    def judge(self, output: Sequence[int]) -> None:
        """Compare the last draft with the output since."""
        draft, self.draft = self.draft, ()
        if not draft:
            return
        tree = as_tree(draft)
        right = right_tokens(tree, output[self.at :])
        self.accepted[self.drafter].record(tree_depth(tree), right)


class BestDrafter:
    """A `Drafter` over several, in order: of equal promises the first drafts."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        costs: StepCosts,
        depths: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Choose between `drafters`, named; `depths` are those of the trees, or chains, of one token, of two,
        and so on, that each drafts at most. Without them all draft chains.
        """
        self._drafters = drafters
        self._costs = costs
        self._depths = depths or {}
        self._histories: WeakKeyDictionary[DecodeSequence, _History] = WeakKeyDictionary()

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`."""
        history = self._histories.get(sequence)
        if history is not None and len(sequence.output_ids) < history.rests_until:
            return True
        return all(drafter.rests(sequence) for drafter in self._drafters.values())

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Draft]:
        """See `Drafter.draft`."""
        for sequence in sequences:
            self._history(sequence).judge(sequence.output_ids)
        if self._costs.wants_plain:
            return [()] * len(sequences)
        drafts: dict[int, Draft] = {}
        wanted = zip(sequences, counts, strict=True)
        offers = [self._offers(sequence, count, len(sequences)) for sequence, count in wanted]
        for turn in range(len(self._drafters)):
            self._ask(turn, sequences, offers, drafts)
        for number, sequence in enumerate(sequences):
            if not offers[number]:
                self._let_rest(sequence)
        return [drafts.get(number, ()) for number in range(len(sequences))]

    def _ask(
        self,
        turn: int,
        sequences: Sequence[DecodeSequence],
        offers: Sequence[Sequence[tuple[str, int]]],
        drafts: dict[int, Draft],
    ) -> None:
        """Ask each sequence's drafter number `turn` by promise, where none before it had a draft."""
        asked: dict[str, list[tuple[int, int]]] = {}
        for number, of_sequence in enumerate(offers):
            if number not in drafts and turn < len(of_sequence):
                name, count = of_sequence[turn]
                asked.setdefault(name, []).append((number, count))
        for name, wanted in asked.items():
            started = time.monotonic()
            some = [sequences[number] for number, _ in wanted]
            found = self._drafters[name].draft(some, [count for _, count in wanted])
            longest = max(map(len, found), default=0)
            self._costs.record_draft(name, longest, time.monotonic() - started)
            for (number, count), draft in zip(wanted, found, strict=True):
                if draft:
                    drafts[number] = draft if isinstance(draft, DraftTree) else draft[:count]
                    history = self._history(sequences[number])
                    history.drafter, history.draft = name, drafts[number]
                    history.at = len(sequences[number].output_ids)

    def _offers(self, sequence: DecodeSequence, count: int, sequences: int) -> list[tuple[str, int]]:
        """Return the drafters that pay for a sequence, best first, and how many tokens each is to draft."""
        history, offers = self._history(sequence), list[tuple[float, str, int]]()
        for name, drafter in self._drafters.items():
            if drafter.rests(sequence):
                continue
            rate = history.accepted[name].rate
            depths = self._depths.get(name)
            length, gain = best_length(rate, count, self._costs, name, sequences, depths)
            if length:
                offers.append((-gain, name, length))
        offers.sort(key=lambda offer: offer[0])
        return [(name, length) for _, name, length in offers]

    def _let_rest(self, sequence: DecodeSequence) -> None:
        """Draft no more for a while; then each drafter gets another chance."""
        history = self._history(sequence)
        history.rests_until = len(sequence.output_ids) + history.rest
        history.rest = min(2 * history.rest, LONGEST_REST)
        history.accepted = {name: Acceptance() for name in self._drafters}

    def _history(self, sequence: DecodeSequence) -> _History:
        history = self._histories.get(sequence)
        if history is None:
            history = _History({name: Acceptance() for name in self._drafters})
            self._histories[sequence] = history
        return history
