"""Masks over the vocabulary for outputs that must match a grammar, kept token by token.

A grammar is compiled for the model's vocabulary and kept; each output begins with a copy of it and
follows its own tokens. A later attempt at a request follows the tokens delivered so far, which costs about
2 µs each. A grammar that begins after reasoning lets every token come until that has ended.

Copies share the table of their lexer's states, which grows with every token that one of them follows until it
is full (`diptych.runtime.grammar.matcher.LIMITS`): then none of them can continue. So after FRESH_TOKENS
tokens a grammar is compiled anew for later outputs, and an output whose table was filled by others continues
with a table of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
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
from diptych.runtime.grammar.reasoning_span import EndMark, ReasoningSpan, SpanTracker
from diptych.runtime.grammar.vocabulary import vocabulary
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.worker.v1 import work_pb2

log = logging.getLogger(__name__)

KEPT: Final = 64
"""Compiled grammars that are kept, the most recently used ones."""
FRESH_TOKENS: Final = 16_384
"""Tokens followed by its copies after which a grammar is compiled anew: a choice of a thousand labels fills
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
    vocabulary: LLTokenizer
    followed: int = 0

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.vocabulary.vocab_size

    def copy(self) -> LLMatcher | None:
        """Return a matcher for one more output; None if the table has no room for it."""
        matcher = self.matcher.deep_copy()
        matcher.compute_bitmask()  # its first mask, which is there already or cannot be made any more
        return None if matcher.is_error() else matcher


class GrammarState:
    """The state of one output in its grammar; a `TokenMask` of the engine. Not thread-safe."""

    def __init__(
        self,
        matcher: LLMatcher,
        compiled: Compiled,
        anew: Callable[[], Compiled],
        output: Iterable[int] = (),
        span: SpanTracker | None = None,
    ) -> None:
        """Take `matcher`, a copy of `compiled` that has followed `output`; `anew` compiles again.

        The grammar holds after `span`, which is not part of `output`.
        """
        self._matcher = matcher
        self._span = span
        self._compiled = compiled
        self._anew = anew
        self._output = list(output)
        self._allowed = np.zeros((compiled.vocab_size + 31) // 32, dtype=np.int32)

    def accept(self, token_id: int) -> None:
        """Follow `token_id`. A token that the mask forbids makes the state `stuck`."""
        self.follow((token_id,))

    def follow(self, token_ids: Iterable[int]) -> None:
        """Follow each of `token_ids`."""
        tokens = list(token_ids)
        if self._span is not None:
            tokens = list(self._span.push(tokens))
        if not tokens:
            return
        self._output += tokens
        self._compiled.followed += len(tokens)
        self._matcher.consume_tokens(tokens)

    def apply(self, scores: npt.NDArray[np.float32]) -> None:
        """Set the scores of forbidden tokens to minus infinity, in place: all scores of a `stuck` state.

        `scores` is `[vocab]`; rows past the vocabulary, which only pad, are forbidden too. Applying twice
        changes nothing, so that a step may be computed again. Within reasoning all tokens may come, and
        before it those that open it, too.
        """
        if self.dormant:
            return
        openers = [] if self._span is None else list(self._span.openers)
        free = scores[openers]
        if self._opening:
            scores[:] = -np.inf
        else:
            self._mask(scores)
        scores[openers] = free

    def _mask(self, scores: npt.NDArray[np.float32]) -> None:
        if not self._masked() and not (self._crowded and self._begin_anew() and self._masked()):
            scores[:] = -np.inf
            return
        vocab_size = self._compiled.vocab_size
        bits = np.unpackbits(self._allowed.view(np.uint8), count=vocab_size, bitorder="little")
        np.putmask(scores[:vocab_size], bits == 0, -np.inf)
        scores[vocab_size:] = -np.inf

    def copy(self) -> GrammarState:
        """Return a state at the same place, for an output that branches off this one."""
        span = None if self._span is None else self._span.copy()
        return GrammarState(self._matcher.deep_copy(), self._compiled, self._anew, self._output, span)

    def forced(self) -> bytes:
        """Return the text that must come next; empty where there is a choice, or before the grammar."""
        return b"" if self.dormant or self._opening else self._matcher.compute_ff_bytes()

    def allows(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens may come next, one after the other."""
        return self._matcher.validate_tokens(list(token_ids)) == len(token_ids)

    def tokenize(self, text: bytes) -> list[int]:
        """Return the tokens of a text by itself."""
        return self._compiled.vocabulary.tokenize_bytes(text)

    def spelled(self, token_ids: Sequence[int]) -> bytes:
        """Return the text of tokens."""
        return self._compiled.vocabulary.decode_bytes(list(token_ids))

    @property
    def dormant(self) -> bool:
        """True within reasoning, which the grammar begins after."""
        return self._span is not None and self._span.inside

    @property
    def _opening(self) -> bool:
        return self._span is not None and self._span.opening

    @property
    def complete(self) -> bool:
        """True if the output is complete: only an end of sequence may follow."""
        begun = not (self.dormant or self._opening)
        return begun and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def stuck(self) -> bool:
        """True if the grammar cannot continue: a token broke it, or a mask took too much work."""
        return self._matcher.is_error()

    def _masked(self) -> bool:
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        return not self._matcher.is_error()

    @property
    def _crowded(self) -> bool:
        """True if other outputs filled the table. An output that fills one alone would fill the next one,
        too, and compiling delays the step.
        """
        full = "too many states" in self._matcher.get_error()
        return full and 2 * len(self._output) < self._compiled.followed

    def _begin_anew(self) -> bool:
        """Move to a table of its own, at the same place; return whether one could be made."""
        try:
            self._compiled = self._anew()
        except BadGrammar:
            return False
        self._matcher = self._compiled.matcher.deep_copy()
        output, self._output = self._output, []
        self.follow(output)
        return True


class Grammars:
    """Compiled grammars of one model. The vocabulary is read at the first use."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, Compiled] = OrderedDict()
        self._own: weakref.WeakSet[Compiled] = weakref.WeakSet()  # those of outputs that began anew
        self._lock = threading.Lock()  # of these
        self._compiling = threading.Lock()  # one at a time: the cores are for steps
        self._known = ThreadPoolExecutor(1, "known-grammars")  # does not wait for a new grammar

    def start(self, message: work_pb2.Grammar, delivered: Iterable[int] = ()) -> asyncio.Task[GrammarState]:
        """Start a task, off the event loop, that returns the state after the tokens `delivered`.

        A known grammar does not wait for new ones, unless its table is full or old. The task raises
        BadGrammar.
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
        return None if found is None else self._state(*found, message, delivered)

    def start_now(self, message: work_pb2.Grammar, delivered: Iterable[int] = ()) -> GrammarState:
        """Return the state as `start` does, on this thread. Raises BadGrammar."""
        grammar = _grammar(message)
        found = self._copied(grammar)
        if found is None:
            with self._compiling:
                # Another thread may have compiled it meanwhile.
                found = self._copied(grammar) or self._added(grammar)
        return self._state(*found, message, delivered)

    def _state(
        self, compiled: Compiled, matcher: LLMatcher, message: work_pb2.Grammar, delivered: Iterable[int]
    ) -> GrammarState:
        span = SpanTracker(_span(message.after)) if message.HasField("after") else None
        state = GrammarState(matcher, compiled, partial(self._begin_anew, _grammar(message)), span=span)
        state.follow(delivered)
        return state

    def _copied(self, grammar: Grammar) -> tuple[Compiled, LLMatcher] | None:
        """Return a kept grammar and a copy of its matcher; None if there is none, or no room in its table."""
        with self._lock:
            compiled = self._compiled.get(grammar.digest)
            if compiled is None or compiled.followed >= FRESH_TOKENS or (matcher := compiled.copy()) is None:
                return None
            self._compiled.move_to_end(grammar.digest)
            return compiled, matcher

    def _added(self, grammar: Grammar) -> tuple[Compiled, LLMatcher]:
        """Compile `grammar` and keep it, in place of the least recently used one if there are too many."""
        compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar.digest] = compiled
            self._compiled.move_to_end(grammar.digest)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return compiled, compiled.matcher.deep_copy()

    def _begin_anew(self, grammar: Grammar) -> Compiled:
        """Compile a table for one output. Raises BadGrammar where too many have one."""
        if len(self._own) >= OWN_TABLES:
            raise BadGrammar("takes too much memory")
        compiled = self._compile(grammar)
        self._own.add(compiled)
        return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        vocabulary = self._loaded()
        return Compiled(new_matcher(grammar, vocabulary), vocabulary)

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


def _span(message: work_pb2.ReasoningSpan) -> ReasoningSpan:
    ends = (EndMark(tuple(end.ids), end.until if end.HasField("until") else None) for end in message.ends)
    return ReasoningSpan(
        message.open, tuple(message.opens), tuple(end for end in ends if end.ids), tuple(message.leads)
    )


def _seen(task: asyncio.Task[GrammarState]) -> None:
    """Retrieve the exception of a task that no request awaits, which asyncio would log else."""
    if not task.cancelled():
        task.exception()
