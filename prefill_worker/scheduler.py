"""Schedule of prefill: the prompts that ask for blocks now, and the chunks of the next step.

Pure: plain values in, plain values out. The one idea is that computed tokens catch up with existing
ones: a step has a budget of tokens, filled with chunks of several prompts in order of priority, then
arrival. Grants are late: a prompt asks for decode memory only when it is about to run, so that a long
queue here pins no blocks there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.kv.kv_memory import KVLayout
from kvtransfer.protocol.messages import Key


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with `tokens` still to compute for `decode`, a decode worker or a line of asks there."""

    key: Key
    tokens: int
    decode: str
    priority: int
    arrived: int
    chunk_limit: int | None = None
    """Most tokens of a chunk: logits of every token, where they are wanted, take memory and time."""
    unbroken: tuple[tuple[int, int], ...] = ()
    """Begin and end of stretches of its tokens within which no chunk may end: images whose rows see one
    another.
    """
    blocks: KVLayout | None = None
    """Layout of the blocks that it is computed into, once these are granted."""

    def cut(self, tokens: int) -> int:
        """Return where a chunk of about `tokens` may end: before a stretch, or behind one that it begins with
        and that is longer.
        """
        for begin, end in self.unbroken:
            if begin < tokens < end:
                return begin if begin > 0 else end
        return tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `tokens` tokens of a prompt; `last` says that its logits are wanted."""

    key: Key
    tokens: int
    last: bool


ENOUGH_ON_CPU = 192
"""Tokens that keep a CPU's arithmetic busy: a step of more computes no more of them a second."""


def plan_chunks(granted: Sequence[Prompt], budget: int, enough: int) -> list[Chunk]:
    """Fill one step of at most `budget` tokens; prompts join it only as long as it has fewer than `enough`.

    All prompts of a step have their first tokens when it ends. Where more prompts only make the step longer,
    the first ones need not wait for later ones.

    All of its blocks have one layout, that of the first prompt: those of decode workers with other drafters
    differ.

    Only its last chunk may leave a prompt unfinished, and those whose chunks are limited or end before an
    image. An image that goes whole may take the step beyond its budget, if that is how it begins.
    """
    chunks = []
    enough = min(enough, budget)
    filled = 0
    in_order = _in_order(granted)
    for prompt in [one for one in in_order if one.blocks == in_order[0].blocks]:
        if filled >= enough:
            break
        tokens = min(prompt.tokens, budget - filled)
        if prompt.chunk_limit is not None:
            tokens = min(tokens, prompt.chunk_limit)
        if (tokens := prompt.cut(tokens)) > budget - filled and filled:
            break
        chunks.append(Chunk(prompt.key, tokens, last=tokens == prompt.tokens))
        filled += tokens
    return chunks


def plan_asks(
    queued: Sequence[Prompt],
    asked: Sequence[Prompt],
    granted: Sequence[Prompt],
    *,
    lookahead: int,
    max_prompts: int,
) -> list[Key]:
    """Return the queued prompts that ask for blocks now.

    A prompt asks while fewer than `lookahead` tokens, of fewer than `max_prompts` prompts, are granted here
    or asked of its own decode worker: one full decode worker does not hold up the prompts of another. Order
    among the prompts of one decode worker is kept: a small prompt does not overtake a large one that waits
    for blocks, unless its priority is higher. Asks of a lower one are behind it there, too.
    """
    granted_tokens = sum(prompt.tokens for prompt in granted)
    tokens: defaultdict[str, int] = defaultdict(lambda: granted_tokens)
    prompts: defaultdict[str, int] = defaultdict(lambda: len(granted))
    ahead = deque(_in_order(asked))
    keys = []
    for prompt in _in_order(queued):
        while ahead and ahead[0].priority >= prompt.priority:
            other = ahead.popleft()
            tokens[other.decode] += other.tokens
            prompts[other.decode] += 1
        if tokens[prompt.decode] >= lookahead or prompts[prompt.decode] >= max_prompts:
            continue
        keys.append(prompt.key)
        tokens[prompt.decode] += prompt.tokens
        prompts[prompt.decode] += 1
    return keys


def _in_order(prompts: Sequence[Prompt]) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: (-prompt.priority, prompt.arrived))
