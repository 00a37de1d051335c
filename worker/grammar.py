"""What may come next in an output that must match a grammar: a mask over the vocabulary, kept token by token.

A grammar is compiled once for the model's vocabulary and kept; each output begins with a copy of it and
follows its own tokens. An attempt that takes a request up again follows the tokens delivered so far, which
costs about 2 µs each.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from diptych.worker.v1 import work_pb2
from runtime.grammar.grammar import BadGrammar, Grammar, Kind
from runtime.grammar.matcher import new_matcher
from runtime.grammar.vocabulary import vocabulary
from runtime.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

KEPT: Final = 64
"""Compiled grammars that are kept, the last used ones."""
KINDS: Final = {
    work_pb2.Grammar.KIND_JSON_SCHEMA: Kind.JSON_SCHEMA,
    work_pb2.Grammar.KIND_REGEX: Kind.REGEX,
    work_pb2.Grammar.KIND_LARK: Kind.LARK,
}


class GrammarState:
    """Where one output stands in its grammar; a `TokenMask` of the engine's. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._allowed = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    def accept(self, token_id: int) -> None:
        """The output goes on with `token_id`. One that the mask forbids makes the state `stuck`."""
        self._matcher.consume_token(token_id)

    def follow(self, token_ids: Iterable[int]) -> None:
        """`accept` all of them."""
        self._matcher.consume_tokens(list(token_ids))

    def apply(self, scores: npt.NDArray[np.float32]) -> None:
        """Set what must not come to minus infinity, in place: everything, if the state is `stuck`.

        `scores` is `[vocab]`; rows past the vocabulary, which only pad, are forbidden too. Applying twice
        changes nothing, so that a step may be computed again.
        """
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        if self._matcher.is_error():
            scores[:] = -np.inf
            return
        bits = np.unpackbits(self._allowed.view(np.uint8), count=self._vocab_size, bitorder="little")
        np.putmask(scores[: self._vocab_size], bits == 0, -np.inf)
        scores[self._vocab_size :] = -np.inf

    def copy(self) -> GrammarState:
        """The same place in the grammar, for an output that parts from this one."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)

    @property
    def complete(self) -> bool:
        """Whether the output is complete and cannot go on: all that may come now is an end of sequence."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def stuck(self) -> bool:
        """Whether the grammar cannot continue: a token broke it, or a mask took too much work."""
        return self._matcher.is_error()


class Grammars:
    """Compiles for one model and keeps what was compiled last. The vocabulary is read at the first use."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, message: work_pb2.Grammar, delivered: Iterable[int] = ()) -> asyncio.Task[GrammarState]:
        """The state after the tokens `delivered`, compiled off the event loop. Ends in `BadGrammar` or it."""
        task = asyncio.create_task(asyncio.to_thread(self.start_now, message, tuple(delivered)))
        task.add_done_callback(_seen)
        return task

    def start_now(self, message: work_pb2.Grammar, delivered: Iterable[int] = ()) -> GrammarState:
        """As `start`, on this thread."""
        kind = KINDS.get(message.kind)
        if kind is None:
            raise BadGrammar("is of a kind that this worker does not know")
        grammar = Grammar(kind, message.text)
        with self._lock:
            matcher = self._matcher(grammar).deep_copy()
            vocab_size = self._loaded().vocab_size
        state = GrammarState(matcher, vocab_size)
        state.follow(delivered)
        return state

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        digest = grammar.digest
        found = self._compiled.get(digest)
        if found is None:
            found = self._compiled[digest] = new_matcher(grammar, self._loaded())
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(digest)
        return found

    def _loaded(self) -> LLTokenizer:
        if self._vocabulary is None:
            try:
                self._vocabulary = vocabulary(Tokenizer.load(self._model_path))
            except (ValueError, OSError) as error:
                raise BadGrammar(f"cannot be applied to this model: {error}") from error
        return self._vocabulary


def _seen(task: asyncio.Task[GrammarState]) -> None:
    """Of a request that is over nobody asks how its grammar was: that is no error to complain about."""
    if not task.cancelled():
        task.exception()
