"""What may come next in an output that must match a grammar: a mask over the vocabulary, kept token by token.

A grammar is compiled for the model's vocabulary and kept; each output begins with a copy of it and
follows its own tokens. An attempt that takes a request up again follows the tokens delivered so far, which
costs about 2 µs each.

Copies share the table of their lexer's states, which grows with all that they follow and is full some time
(`diptych.runtime.grammar.matcher.LIMITS`): from then on none of them can go on. So after so many tokens a grammar is
compiled anew for the outputs to come, and an output that finds a table full which others filled goes on with
one of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from diptych.runtime.grammar.grammar import BadGrammar, Grammar, Kind
from diptych.runtime.grammar.matcher import new_matcher
from diptych.runtime.grammar.vocabulary import vocabulary
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.worker.v1 import work_pb2

log = logging.getLogger(__name__)

KEPT: Final = 64
"""Compiled grammars that are kept, the last used ones."""
FRESH_TOKENS: Final = 16_384
"""A grammar whose copies have followed so many tokens is compiled anew: a choice of a thousand labels fills
its table in 65,000, and compiling takes milliseconds.
"""
OWN_TABLES: Final = 4
"""Outputs that may have a table of their own at a time, each of 50 to 100 MB at most."""
KINDS: Final = {
    work_pb2.Grammar.KIND_JSON_SCHEMA: Kind.JSON_SCHEMA,
    work_pb2.Grammar.KIND_REGEX: Kind.REGEX,
    work_pb2.Grammar.KIND_LARK: Kind.LARK,
}


@dataclass(slots=True, eq=False, weakref_slot=True)
class Compiled:
    """A grammar at its start, and how many tokens all its copies have followed."""

    matcher: LLMatcher
    vocab_size: int
    followed: int = 0

    def copy(self) -> LLMatcher | None:
        """For one more output; None if there is no room for it."""
        matcher = self.matcher.deep_copy()
        matcher.compute_bitmask()  # its first mask, which is there already or cannot be made any more
        return None if matcher.is_error() else matcher


class GrammarState:
    """Where one output stands in its grammar; a `TokenMask` of the engine's. Not thread-safe."""

    def __init__(
        self,
        matcher: LLMatcher,
        compiled: Compiled,
        anew: Callable[[], Compiled],
        output: Iterable[int] = (),
    ) -> None:
        """`matcher` is a copy of `compiled` that has followed `output`; `anew` compiles the grammar again."""
        self._matcher = matcher
        self._compiled = compiled
        self._anew = anew
        self._output = list(output)
        self._allowed = np.zeros((compiled.vocab_size + 31) // 32, dtype=np.int32)

    def accept(self, token_id: int) -> None:
        """The output goes on with `token_id`. One that the mask forbids makes the state `stuck`."""
        self.follow((token_id,))

    def follow(self, token_ids: Iterable[int]) -> None:
        """`accept` all of them."""
        tokens = list(token_ids)
        self._output += tokens
        self._compiled.followed += len(tokens)
        self._matcher.consume_tokens(tokens)

    def apply(self, scores: npt.NDArray[np.float32]) -> None:
        """Set what must not come to minus infinity, in place: everything, if the state is `stuck`.

        `scores` is `[vocab]`; rows past the vocabulary, which only pad, are forbidden too. Applying twice
        changes nothing, so that a step may be computed again.
        """
        if not self._masked() and not (self._crowded and self._begin_anew() and self._masked()):
            scores[:] = -np.inf
            return
        vocab_size = self._compiled.vocab_size
        bits = np.unpackbits(self._allowed.view(np.uint8), count=vocab_size, bitorder="little")
        np.putmask(scores[:vocab_size], bits == 0, -np.inf)
        scores[vocab_size:] = -np.inf

    def copy(self) -> GrammarState:
        """The same place in the grammar, for an output that parts from this one."""
        return GrammarState(self._matcher.deep_copy(), self._compiled, self._anew, self._output)

    @property
    def complete(self) -> bool:
        """Whether the output is complete and cannot go on: all that may come now is an end of sequence."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def stuck(self) -> bool:
        """Whether the grammar cannot continue: a token broke it, or a mask took too much work."""
        return self._matcher.is_error()

    def _masked(self) -> bool:
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        return not self._matcher.is_error()

    @property
    def _crowded(self) -> bool:
        """Whether it was others that filled the table: who fills one alone would fill the next one, too, and
        compiling holds up the step.
        """
        full = "too many states" in self._matcher.get_error()
        return full and 2 * len(self._output) < self._compiled.followed

    def _begin_anew(self) -> bool:
        """The same place, in a table of its own."""
        try:
            self._compiled = self._anew()
        except BadGrammar:
            return False
        self._matcher = self._compiled.matcher.deep_copy()
        output, self._output = self._output, []
        self.follow(output)
        return True


class Grammars:
    """Compiles for one model and keeps what was compiled last. The vocabulary is read at the first use."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, Compiled] = OrderedDict()
        self._own: weakref.WeakSet[Compiled] = weakref.WeakSet()  # those of outputs that began anew
        self._lock = threading.Lock()  # of these
        self._compiling = threading.Lock()  # one at a time: the cores are for steps
        self._known = ThreadPoolExecutor(1, "known-grammars")  # behind nobody's new one

    def start(self, message: work_pb2.Grammar, delivered: Iterable[int] = ()) -> asyncio.Task[GrammarState]:
        """The state after the tokens `delivered`, compiled off the event loop. Ends in `BadGrammar` or it.

        One that is known waits for no new ones, but where its table is full or old.
        """
        task = asyncio.create_task(self._start(message, tuple(delivered)))
        task.add_done_callback(_seen)
        return task

    async def _start(self, message: work_pb2.Grammar, delivered: tuple[int, ...]) -> GrammarState:
        # Copying waits for a mask that is made in the same table: off the event loop, too.
        known = asyncio.get_running_loop().run_in_executor(self._known, self._start_known, message, delivered)
        state = await known
        return state if state is not None else await asyncio.to_thread(self.start_now, message, delivered)

    def _start_known(self, message: work_pb2.Grammar, delivered: Iterable[int]) -> GrammarState | None:
        grammar = _grammar(message)
        found = self._copied(grammar)
        return None if found is None else self._state(*found, grammar, delivered)

    def start_now(self, message: work_pb2.Grammar, delivered: Iterable[int] = ()) -> GrammarState:
        """As `start`, on this thread."""
        grammar = _grammar(message)
        found = self._copied(grammar)
        if found is None:
            with self._compiling:
                # Somebody may have compiled it meanwhile.
                found = self._copied(grammar) or self._added(grammar)
        return self._state(*found, grammar, delivered)

    def _state(
        self, compiled: Compiled, matcher: LLMatcher, grammar: Grammar, delivered: Iterable[int]
    ) -> GrammarState:
        state = GrammarState(matcher, compiled, partial(self._begin_anew, grammar))
        state.follow(delivered)
        return state

    def _copied(self, grammar: Grammar) -> tuple[Compiled, LLMatcher] | None:
        """A grammar that is kept, and a copy of it; None if there is none, or no room in its table."""
        with self._lock:
            compiled = self._compiled.get(grammar.digest)
            if compiled is None or compiled.followed >= FRESH_TOKENS or (matcher := compiled.copy()) is None:
                return None
            self._compiled.move_to_end(grammar.digest)
            return compiled, matcher

    def _added(self, grammar: Grammar) -> tuple[Compiled, LLMatcher]:
        """It is compiled, and kept in place of an older one."""
        compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar.digest] = compiled
            self._compiled.move_to_end(grammar.digest)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return compiled, compiled.matcher.deep_copy()

    def _begin_anew(self, grammar: Grammar) -> Compiled:
        """A table for one output. Raises `BadGrammar` where too many have one."""
        if len(self._own) >= OWN_TABLES:
            raise BadGrammar("takes too much memory")
        compiled = self._compile(grammar)
        self._own.add(compiled)
        return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        vocabulary = self._loaded()
        return Compiled(new_matcher(grammar, vocabulary), vocabulary.vocab_size)

    def _loaded(self) -> LLTokenizer:
        if self._vocabulary is None:
            try:
                self._vocabulary = vocabulary(Tokenizer.load(self._model_path))
            except (ValueError, OSError) as error:
                raise BadGrammar(f"cannot be applied to this model: {error}") from error
        return self._vocabulary


def _grammar(message: work_pb2.Grammar) -> Grammar:
    kind = KINDS.get(message.kind)
    if kind is None:
        raise BadGrammar("is of a kind that this worker does not know")
    return Grammar(kind, message.text)


def _seen(task: asyncio.Task[GrammarState]) -> None:
    """Of a request that is over nobody asks how its grammar was: that is no error to complain about."""
    if not task.cancelled():
        task.exception()
