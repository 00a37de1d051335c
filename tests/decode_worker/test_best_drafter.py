"""The choice of a drafter for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.best_drafter import FIRST_REST, BestDrafter
from decode_worker.draft_lengths import StepCosts
from decode_worker.sequence import DecodeSequence
from diptych.engine.sampling import SampleRow, SamplingParams


class Counting:
    """Drafts 1, 2, 3, ... after the last token, times `factor`; the text of these tests goes up by one."""

    def __init__(self, factor: int) -> None:
        self.factor, self.asked = factor, 0

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        self.asked += len(sequences)
        return [
            [one.output_ids[-1] + self.factor * n for n in range(1, count + 1)]
            for one, count in zip(sequences, counts, strict=True)
        ]

    def rests(self, sequence: DecodeSequence) -> bool:
        return False


def known_costs() -> StepCosts:
    costs = StepCosts()
    costs.record_step(1, 1.0, plain=True)
    costs.record_step(5, 1.2, plain=False)
    return costs


def sequence() -> DecodeSequence:
    output = [1]
    return DecodeSequence(3, output, SampleRow(SamplingParams(), (7, 8, 9), output))


def go_on(text: DecodeSequence, draft: Sequence[int]) -> int:
    """Append what the text has next, and the right part of the draft; return how many were right."""
    right = 0
    for token in (*draft, None):
        text.output_ids.append(text.output_ids[-1] + 1)
        if token != text.output_ids[-1]:
            break
        right += 1
    return right


def test_the_drafter_that_is_right_drafts() -> None:
    liar, teller = Counting(2), Counting(1)
    best, text = BestDrafter({"liar": liar, "teller": teller}, known_costs()), sequence()
    rights = [go_on(text, best.draft([text], [4])[0]) for _ in range(20)]
    assert rights[0] == 0
    assert rights[-10:] == [4] * 10
    assert liar.asked < 5


def test_a_sequence_without_right_drafts_rests_and_is_tried_again() -> None:
    liar = Counting(2)
    best, text = BestDrafter({"liar": liar}, known_costs()), sequence()
    rests = []
    for _ in range(400):
        rests.append(best.rests(text))
        go_on(text, () if rests[-1] else best.draft([text], [4])[0])
    assert FIRST_REST < rests.count(True) < 400
    assert rests.count(False) < 120
    assert not all(rests[-60:])


def test_no_draft_before_a_plain_step_was_timed() -> None:
    teller, text = Counting(1), sequence()
    assert list(BestDrafter({"teller": teller}, StepCosts()).draft([text], [4])) == [()]
    assert teller.asked == 0
