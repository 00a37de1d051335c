"""The sequences of one attempt, and the blocks of the pool that they hold.

Every sequence holds each of its blocks once. Full blocks never change, so that any number of sequences share
them; the block that a sequence's next token is written to must be its own: a shared one is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from decode_worker.prefix_publisher import PrefixPublisher
from decode_worker.window_rows import WindowRows
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.window_table import PromptWindow, WindowTable
from diptych.engine.sampling import SampleRow
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.grammar_masks import GrammarState

MOST_BEHIND = 64
"""Tokens that the draft model may be behind a sequence before it is given up for this one."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class DecodeSequence:
    """A row of a step: a prompt and its output so far. The KV of the last token is not computed yet."""

    prompt_tokens: int
    output_ids: list[int]
    next_row: SampleRow
    """Sampling of the next token; it sees `output_ids` grow."""
    grammar: GrammarState | None = None
    """State after the output so far; the mask of `next_row`."""
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of the first blocks, which are in the prefix cache."""
    attempt: Attempt | None = None
    """Attempt whose rules drafts have to keep; None: `next_row` says it all."""
    lanes: int = 0
    """Tokens that the next step may draft: its blocks have room for them (speculation.py)."""
    draft: list[int] = field(default_factory=list)
    """Tokens expected after `output_ids`, computed by the next step; at most `lanes`."""
    draft_parents: list[int] = field(default_factory=list)
    """Place in `draft` of the token that each of them follows; -1: the last one of `output_ids`."""
    draft_rows: list[SampleRow] = field(default_factory=list)
    """Sampling of the token after each of `draft`."""
    draft_computed: int | None = None
    """Leading tokens whose keys and values of the draft model are there; None: it drafts no more for this."""
    hidden: torch.Tensor | None = None
    """Rows `[rows of logits, hidden]` of its last step behind the final norm, if the backend gives them."""
    hidden_row: int = 0
    """The one of them from which the last token was sampled."""
    step_features: torch.Tensor | None = None
    """Rows `[rows of logits, features]` of its last step, if the backend gives them."""
    features: list[torch.Tensor] = field(default_factory=list)
    """Rows of these, for each token since `draft_computed` the one that it was sampled from; the first ones
    may be missing.
    """
    adapter: int | None = None
    """Slot of the attempt's adapter; None: the base model."""
    shift: int = 0
    """Rotary positions of its output less their places (`Attempt.output_shift`)."""
    window: WindowTable | None = None
    """Blocks of the layers with a window, where these have blocks of their own; `block_ids` are those of the
    others then.
    """

    behind: int = 0
    """Tokens before the last one that recurrent states lack: they were drafted, and right. The next step
    computes them once more, and keeps the states behind them.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_tokens + len(self.output_ids)

    @property
    def computed(self) -> int:
        """Leading tokens of which nothing is computed any more: at least the last one is left."""
        return self.num_tokens - 1 - self.behind

    @property
    def logit_rows(self) -> int:
        """Rows of logits that it has in a step."""
        return 1 + len(self.draft)

    def step(self, memory: KVMemory, follows: int | None) -> SequenceStep:
        """Return its share of a step over `memory`, after row `follows` of the step before, if given."""
        start, behind = self.computed, self.behind
        if follows is not None:  # a step that leaves nothing behind
            start, behind = self.num_tokens, 0
        first, windows = 0, memory.layout.windows
        if windows is not None:
            first = windows.first_read(start, memory.layout.block_size)
        return SequenceStep(
            memory=memory,
            block_table=self.block_ids,
            start=start,
            token_ids=self.output_ids[-1 - behind :] + self.draft,
            wants_logits=True,
            trailing=1 + len(self.draft),
            follows=follows,
            adapter=self.adapter,
            shift=self.shift,
            window_tables=() if self.window is None else self.window.cut(first),
            window_first=first,
            parents=self._parents(),
            settled=1 + behind if memory.layout.states is not None and (behind or self.draft) else None,
        )

    def sample_rows(self) -> Sequence[SampleRow]:
        """Return the sampling of each of its rows of logits."""
        return (self.next_row, *self.draft_rows) if self.draft else (self.next_row,)

    def drafted_row(self, row: int, token_id: int) -> int | None:
        """Return the row of logits after `token_id`, if this was drafted to follow what `row` is after."""
        for place, (drafted, parent) in enumerate(zip(self.draft, self.draft_parents, strict=False)):
            if parent + 1 == row and drafted == token_id:
                return place + 1
        return None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep what drafters read of the rows of the last step from which its tokens were sampled."""
        self.hidden_row = rows[-1]
        if self.step_features is not None and self.draft_computed is not None:
            self.features += [self.step_features[row] for row in rows]
            del self.features[: -MOST_BEHIND - 1]

    def _parents(self) -> Sequence[int] | None:
        """Return the parents of a step's tokens where the draft is a tree; None: it is a chain."""
        if not self.draft or all(parent == place - 1 for place, parent in enumerate(self.draft_parents)):
            return None
        return [-1, *(parent + 1 for parent in self.draft_parents)]


class AttemptBlocks:
    """Grows, forks and releases sequences of one attempt, between two steps."""

    def __init__(
        self,
        attempt: Attempt,
        pool: BlockPool,
        memory: KVMemory,
        prefixes: PrefixPublisher,
        on_freed: Callable[[], None] | None = None,
    ) -> None:
        """Serve `attempt`; `on_freed` is called where blocks become free before a sequence ends."""
        self._attempt = attempt
        self._pool = pool
        self._memory = memory
        self._prefixes = prefixes
        self._on_freed = on_freed
        self._block_size = memory.layout.block_size
        groups = memory.layout.windows
        self._windows = None if groups is None else WindowRows(pool, memory, groups)
        self.place_blocks = memory.layout.blocks_per_place
        """Blocks that a sequence takes for a place."""
        self._reserved = False
        self._drafted = False
        self._prompt: list[int] = []
        self._prompt_keys: list[bytes] = []
        self._reserve: list[int] = []
        self._distrusted = pool.distrusted

    def adopt_prompt(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        window: PromptWindow | None = None,
        *,
        drafted: bool = True,
    ) -> None:
        """Take the handoff's blocks: those of the prompt's `num_tokens` tokens, then the reserve; and the
        windowed ones, of which those that are not read any more become free. `drafted`: the draft model's
        segment came with them.
        """
        self._drafted = drafted and self._memory.draft is not None
        held = self._memory.layout.blocks_for(num_tokens)
        self._prompt, self._reserve = list(block_ids[:held]), list(block_ids[held:])
        self._reserved = bool(self._reserve)
        if self._trusted:
            self._prompt_keys = self._prefixes.publish(self._attempt, num_tokens, self._prompt)
        if self._windows is not None and window is not None:
            unread = self._windows.adopt(window, num_tokens)
            if self._trusted:
                self._windows.publish_prompt(self._prompt_keys)
                self._windows.publish_shared(window, self._prompt, self._prompt_keys)
            self._give_back(unread)

    def start(self, sequence: DecodeSequence) -> None:
        """Let a sequence begin after the prompt."""
        self._pool.retain(self._prompt)
        sequence.block_ids, sequence.block_keys = list(self._prompt), list(self._prompt_keys)
        if self._windows is not None:
            self._windows.start(sequence)
        if self._drafted:
            sequence.draft_computed = sequence.num_tokens

    def release_prompt(self) -> None:
        """Release the prompt once every sequence has begun: the only holder of a block may write to it."""
        self._pool.release(self._prompt)
        self._prompt = []
        if self._windows is not None:
            self._windows.release_prompt()
            self._report_freed()  # what was not read any more when the prompt came

    def fork(self, parent: DecodeSequence, child: DecodeSequence) -> None:
        """Let `child`, which has the parent's tokens and one more, begin with the parent's blocks."""
        self._pool.retain(parent.block_ids)
        child.block_ids, child.block_keys = list(parent.block_ids), list(parent.block_keys)
        if self._windows is not None:
            self._windows.fork(parent, child)

    def demand(self, sequence: DecodeSequence, unknown: int = 0) -> tuple[int, tuple[int, int] | None]:
        """Return the number of blocks that a sequence's next token needs, and the shared block that it would
        be written to, with its number of holders: `Candidate.growth` and `Candidate.shared`. Windowed blocks
        of a place have the holders of its full one.

        `unknown` tokens before it are still being computed.
        """
        place = (sequence.num_tokens - 1 + unknown) // self._block_size
        reserve = len(self._reserve)
        if reserve >= self.place_blocks:
            return 0, None
        if place >= len(sequence.block_ids):
            return self.place_blocks - reserve, None
        block = sequence.block_ids[place]
        held = self._pool.references(block)
        return 0, (block, held) if held > 1 else None

    def group_demand(self, sequences: Sequence[DecodeSequence]) -> int:
        """Return the blocks that the next tokens of all `sequences` need from the pool in one step."""
        need, holders = 0, dict[int, int]()
        for sequence in sequences:
            place = (sequence.num_tokens - 1) // self._block_size
            if place >= len(sequence.block_ids):
                need += self.place_blocks
                continue
            block = sequence.block_ids[place]
            if holders.setdefault(block, self._pool.references(block)) > 1:
                need += self.place_blocks
                holders[block] -= 1
        return max(0, need - len(self._reserve))

    def ensure_block(self, sequence: DecodeSequence, unknown: int = 0) -> None:
        """Give a sequence the block that its next token is written to, as in `demand`. Raises OutOfBlocks."""
        place = (sequence.num_tokens - 1 + unknown) // self._block_size
        if place >= len(sequence.block_ids):
            sequence.block_ids.append(self._allocate())
            if self._windows is not None:
                self._windows.grow(sequence, place, self._allocate)
            return
        block = sequence.block_ids[place]
        if (fresh := self._writable(block)) is not None:
            self._memory.copy_block(block, fresh)
            sequence.block_ids[place] = fresh
        if self._windows is not None:
            self._windows.own(sequence, place, self._writable)

    def reserve_lanes(self, sequence: DecodeSequence, count: int, *, spare: int) -> int:
        """Return how many drafted tokens have lanes after the next token, at most `count`.

        Takes blocks for them from the pool where it has more than those of `spare` places; the reserve is for
        tokens that come in any case.
        """
        size = self._block_size
        room = len(sequence.block_ids) * size - sequence.num_tokens
        if (missing := -(-(count - room) // size)) > 0:
            places = min(missing, max(self._pool.available() // self.place_blocks - spare, 0))
            for _ in range(places):
                if self._windows is not None:
                    self._windows.grow(sequence, len(sequence.block_ids), self._from_pool)
                sequence.block_ids.append(self._from_pool())
            room += places * size
        return min(count, room)

    def compact_lanes(self, sequence: DecodeSequence, rows: Sequence[int]) -> None:
        """Move keys and values of the right tokens of a draft to the lanes of their positions.

        `rows` are those of the last step whose tokens stand: the last token's, 0, and the drafted ones'.
        Called before any of them is appended.
        """
        first = sequence.num_tokens - 1
        moves = [(first + row, first + place) for place, row in enumerate(rows) if row != place]
        if moves:
            self._memory.move_lanes(sequence.block_ids, moves)
            if self._windows is not None:
                self._windows.move_lanes(sequence, moves)

    def count_behind(self, sequence: DecodeSequence, drafted: int) -> None:
        """Record that the last step computed `drafted` tokens before the next one as guesses."""
        sequence.behind = drafted if self._memory.layout.states is not None else 0

    def return_lanes(self, sequence: DecodeSequence) -> None:
        """Release the blocks behind that of the next token: drafts that were wrong, or none, had them."""
        needed = (sequence.num_tokens - 1) // self._block_size + 1
        if len(sequence.block_ids) > needed:
            self._pool.release(sequence.block_ids[needed:])
            del sequence.block_ids[needed:]
            if sequence.window is not None:
                self._pool.release(sequence.window.take_from(needed))
            self._report_freed()

    def publish(self, sequence: DecodeSequence) -> None:
        """Enter the blocks that have become full into the prefix cache, and give up windowed ones behind the
        window.

        Those that the draft model has to compute first wait for that: a published block is never written. It
        is given up for a sequence that it no longer drafts for.
        """
        computed = sequence.computed
        if sequence.draft_computed is not None:
            if computed - sequence.draft_computed > MOST_BEHIND:
                sequence.draft_computed = None
            else:
                computed = min(computed, sequence.draft_computed)
        if computed // self._block_size > len(sequence.block_keys) and self._trusted:
            output = sequence.output_ids
            self._prefixes.publish(
                self._attempt, computed, sequence.block_ids, output_ids=output, keys=sequence.block_keys
            )
        if self._windows is not None and (unread := self._windows.take_unread(sequence)):
            self._give_back(unread)
            self._report_freed()

    def distrust(self, sequences: Sequence[DecodeSequence] = ()) -> None:
        """Remove the blocks of the prompt and of `sequences` from the prefix cache: they may be wrong."""
        self._prefixes.distrust(self._attempt, [key for one in sequences for key in one.block_keys[:1]])

    def release(self, sequences: Sequence[DecodeSequence]) -> None:
        """Release the blocks of ended sequences. Blocks without another holder are free, or stay cached."""
        for sequence in sequences:
            if sequence.draft_computed is not None:
                sequence.draft_computed = None
                self.publish(sequence)  # what waited for the draft model
            if sequence.window is not None:
                if self._windows is not None and self._trusted:
                    self._windows.publish(sequence)
                self._pool.release(sequence.window.blocks())
                sequence.window = None
            self._pool.release(sequence.block_ids)
            sequence.block_ids = []

    def release_parents(self, parents: Sequence[DecodeSequence]) -> None:
        """Release sequences that their forks replace.

        Where the attempt has a reserve, as many blocks as become free return to it: later forks need them.
        """
        available = self._pool.available()
        self.release(parents)
        if self._reserved:
            self._reserve += self._pool.allocate(self._pool.available() - available)

    def close(self) -> None:
        """Release the reserve, and a prompt after which no sequence began."""
        self._pool.release(self._prompt)
        self._pool.release(self._reserve)
        self._prompt, self._reserve = [], []
        if self._windows is not None:
            self._windows.release_prompt()

    @property
    def _trusted(self) -> bool:
        """True if no block was distrusted since this attempt came: its own may be built on one."""
        return self._pool.distrusted == self._distrusted

    def _writable(self, block: int) -> int | None:
        """Return what `BlockPool.writable` does, from the reserve while there is one."""
        if not self._reserve:
            return self._pool.writable(block)
        if self._pool.references(block) == 1:
            return None
        self._pool.release([block])
        return self._reserve.pop()

    def _allocate(self) -> int:
        return self._reserve.pop() if self._reserve else self._from_pool()

    def _from_pool(self) -> int:
        (block,) = self._pool.allocate(1)
        return block

    def _give_back(self, blocks: Sequence[int]) -> None:
        """Give up windowed blocks that are not read any more: to the reserve, where the attempt has one."""
        if self._reserved:
            own = [block for block in blocks if self._is_own(block)]
            self._reserve += own
            blocks = [block for block in blocks if block not in own]
        self._pool.release(blocks)

    def _report_freed(self) -> None:
        if self._on_freed is not None:
            self._on_freed()

    def _is_own(self, block: int) -> bool:
        return self._pool.references(block) == 1 and not self._pool.is_cached(block)
