"""What the sequences of one attempt hold of the block pool: shared prefixes, copies on write, a reserve.

Every sequence holds each of its blocks once. Full blocks never change, so that any number of sequences share
them; the one that a sequence's next token is written to must be its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.prefix_publisher import PrefixPublisher
from decode_worker.sequence import DecodeSequence
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker_process.attempt import Attempt


class AttemptBlocks:
    """Grows, forks and releases sequences. All of it happens between two steps."""

    def __init__(
        self, attempt: Attempt, pool: BlockPool, memory: KVMemory, prefixes: PrefixPublisher
    ) -> None:
        self._attempt = attempt
        self._pool = pool
        self._memory = memory
        self._prefixes = prefixes
        self._block_size = memory.layout.block_size
        self._prompt: list[int] = []
        self._prompt_keys: list[bytes] = []
        self._reserve: list[int] = []
        self._distrusted = pool.distrusted

    def take_over(self, block_ids: Sequence[int], num_tokens: int) -> None:
        """The handoff's blocks: those of the prompt's `num_tokens` tokens, then what was reserved."""
        held = self._memory.layout.blocks_for(num_tokens)
        self._prompt, self._reserve = list(block_ids[:held]), list(block_ids[held:])
        if self._trusted:
            self._prompt_keys = self._prefixes.publish(self._attempt, num_tokens, self._prompt)

    def root(self, sequence: DecodeSequence) -> None:
        """Let a sequence begin after the prompt."""
        self._pool.retain(self._prompt)
        sequence.block_ids, sequence.block_keys = list(self._prompt), list(self._prompt_keys)

    def all_rooted(self) -> None:
        """Every sequence that will ever begin has begun: who is alone with a block may write to it."""
        self._pool.release(self._prompt)
        self._prompt = []

    def fork(self, parent: DecodeSequence, child: DecodeSequence) -> None:
        """Let `child`, which has the parent's tokens and one more, begin with what the parent holds."""
        self._pool.retain(parent.block_ids)
        child.block_ids, child.block_keys = list(parent.block_ids), list(parent.block_keys)

    def demand(self, sequence: DecodeSequence, unknown: int = 0) -> tuple[int, tuple[int, int] | None]:
        """Blocks that its next token needs, and the block it would share with others, with how often that is
        held: `Candidate.growth` and `Candidate.shared`. `unknown` tokens come before it that are still being
        computed.
        """
        place = (sequence.num_tokens - 1 + unknown) // self._block_size
        if self._reserve:
            return 0, None
        if place >= len(sequence.block_ids):
            return 1, None
        block = sequence.block_ids[place]
        held = self._pool.references(block)
        return 0, (block, held) if held > 1 else None

    def joint_demand(self, sequences: Sequence[DecodeSequence]) -> int:
        """Blocks that the pool must give so that all of these can take their next tokens in one step."""
        need, holders = 0, dict[int, int]()
        for sequence in sequences:
            place = (sequence.num_tokens - 1) // self._block_size
            if place >= len(sequence.block_ids):
                need += 1
                continue
            block = sequence.block_ids[place]
            if holders.setdefault(block, self._pool.references(block)) > 1:
                need += 1
                holders[block] -= 1
        return max(0, need - len(self._reserve))

    def make_room(self, sequence: DecodeSequence, unknown: int = 0) -> None:
        """Give a sequence the block that its next token is written to, as `demand` has it. OutOfBlocks if the
        pool cannot.
        """
        place = (sequence.num_tokens - 1 + unknown) // self._block_size
        if place >= len(sequence.block_ids):
            sequence.block_ids.append(self._draw())
            return
        block = sequence.block_ids[place]
        if (fresh := self._writable(block)) is not None:
            self._memory.copy_block(block, fresh)
            sequence.block_ids[place] = fresh

    def publish(self, sequence: DecodeSequence) -> None:
        """Enter the blocks that are full by now into the prefix cache."""
        computed = sequence.num_tokens - 1
        if computed // self._block_size > len(sequence.block_keys) and self._trusted:
            output = sequence.output_ids
            self._prefixes.publish(
                self._attempt, computed, sequence.block_ids, output_ids=output, keys=sequence.block_keys
            )

    def distrust(self, sequences: Sequence[DecodeSequence] = ()) -> None:
        """What the blocks of the prompt and of these hold may be wrong: nobody else is to read it."""
        self._prefixes.distrust(self._attempt, [key for one in sequences for key in one.block_keys[:1]])

    def release(self, sequences: Sequence[DecodeSequence]) -> None:
        """These end. Blocks that nobody else holds are free, or stay cached."""
        for sequence in sequences:
            self._pool.release(sequence.block_ids)
            sequence.block_ids = []

    def close(self) -> None:
        """Nothing of the attempt is left: the reserve goes back, and a prompt that nobody began with."""
        self._pool.release(self._prompt)
        self._pool.release(self._reserve)
        self._prompt, self._reserve = [], []

    @property
    def _trusted(self) -> bool:
        """Nothing was found bad since this attempt came: what it holds may be what was forgotten then."""
        return self._pool.distrusted == self._distrusted

    def _writable(self, block: int) -> int | None:
        """As `BlockPool.writable`, on the reserve while there is one."""
        if not self._reserve:
            return self._pool.writable(block)
        if self._pool.references(block) == 1:
            return None
        self._pool.release([block])
        return self._reserve.pop()

    def _draw(self) -> int:
        if self._reserve:
            return self._reserve.pop()
        (block,) = self._pool.allocate(1)
        return block
