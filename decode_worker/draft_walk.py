"""The rules of a request, walked down a draft: how each drafted position is sampled.

Grammars, penalties and suppressed tokens depend on the tokens before. A position is sampled after the drafted
ones before it, so that its row has a state of the grammar of its own, and its own tokens.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from decode_worker.draft_tree import Draft, as_tree
from decode_worker.sequence import DecodeSequence


class DraftWalk:
    """The sampling of the token that follows a sequence and some drafted tokens."""

    def __init__(self, sequence: DecodeSequence) -> None:
        self._attempt = sequence.attempt
        self._grammar = sequence.grammar
        self.row = sequence.next_row
        """Sampling of the token after those that were followed."""

    def follow(self, token_id: int) -> bool:
        """Follow a drafted token; return False, and stay, where nothing may follow it.

        So it is with a token that the grammar forbids, or that ends the output: where it is right, the
        position before gives it.
        """
        attempt, grammar = self._attempt, self._grammar
        output = [*self.row.output_ids, token_id]
        if attempt is None:
            self.row = replace(self.row, output_ids=output)
            return True
        if grammar is not None:
            grammar = grammar.copy()
            grammar.accept(token_id)
            if grammar.stuck:
                return False
        if attempt.finish_reason(token_id, len(output), grammar) is not None:
            return False
        self._grammar = grammar
        self.row = attempt.sample_row(self.row.params, output, grammar)
        return True

    def followed(self, token_id: int) -> DraftWalk | None:
        """Return the walk after a drafted token, or None where nothing may follow it; this one stays."""
        walk = copy(self)
        return walk if walk.follow(token_id) else None


def set_draft(sequence: DecodeSequence, draft: Draft) -> None:
    """Let the next step compute a draft after the last token, as far as the rules let it come.

    At most `sequence.lanes` tokens are kept, the first ones; what follows a token that is not kept is not.
    """
    tree = as_tree(draft)
    sequence.draft, sequence.draft_parents, sequence.draft_rows = [], [], []
    walks = {-1: DraftWalk(sequence)}
    places = {-1: -1}  # among those that are kept
    for place, (token_id, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if len(sequence.draft) == sequence.lanes:
            return
        if parent not in walks or (walk := walks[parent].followed(token_id)) is None:
            continue
        walks[place], places[place] = walk, len(sequence.draft)
        sequence.draft.append(token_id)
        sequence.draft_parents.append(places[parent])
        sequence.draft_rows.append(walk.row)
