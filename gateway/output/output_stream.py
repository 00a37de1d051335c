"""Output of one choice: tokens in; text, tool calls, ids and scores out, with stops, coalescing and billing.

What a model writes before its answer has a text of its own (`gateway.output.reasoning_text`), in which
nothing is looked for. An output is stopped by

- a stop string, found here. Tokens after the one that completed it are neither shown nor billed. The match is
  shown only if the client wants it.
- the end of the only tool call that is allowed, likewise.
- a stop token id (end of sequence included), found by the worker, always the last token. Its id is shown and
  billed, as in other engines, its text only with ``include_stop_in_output`` (and then still subject to
  ``skip_special_tokens``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gateway.attempt.types import TokenLogprob
from gateway.output.detokenizer import Detokenizer
from gateway.output.reasoning_text import ReasoningText
from gateway.output.stop_strings import StopStrings
from gateway.tools.parser import FirstCall, Parsed, ToolCallParser
from gateway.tools.tool import ToolCall
from gateway.tools.unfinished import UnfinishedCalls


class Delta(NamedTuple):
    """New output since the last piece. ``tokens`` counts the tokens even when the client wants no ids.

    ``scores`` belong to ``token_ids``, one each, or are empty.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    tokens: int = 0
    scores: Sequence[tuple[int, TokenLogprob]] = ()  # (token id, score)
    # What the model wrote for them is not in ``text``. A piece without an id continues the call before it.
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Stop string or stop token that ended the output; one of the two is set."""

    text: str | None = field(default=None, repr=False)
    token_id: int | None = None


class OutputStream:
    """Output of one choice.

    Args:
        detokenizer: a fresh one; None when the client wants no text and set no stop strings.
        stops: the client's stop strings; None when it set none.
        stop_ids: the ids at which workers stop.
        include_stop: show what stopped the output.
        min_tokens: a stop string that is complete before so many tokens is ordinary text.
        interval: tokens per piece, at least 1. The first token and the last piece go at once.
        want_scores: pieces carry the scores of their tokens, if the worker sends them.
        calls: a fresh parser of tool calls; None when the client offered no tools.
        one_call: the output ends with its first call.
        unfinished: reads what is left of a call at the end of the output; goes with ``calls``.
        reasoning: of this output; None: all of it is the answer.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: StopStrings | None,
        *,
        stop_ids: frozenset[int],
        include_stop: bool,
        min_tokens: int,
        interval: int,
        want_text: bool,
        want_token_ids: bool,
        want_scores: bool = False,
        calls: ToolCallParser | None = None,
        one_call: bool = False,
        unfinished: UnfinishedCalls | None = None,
        reasoning: ReasoningText | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._interval = interval
        self._want_text = want_text
        self._want_token_ids = want_token_ids
        self._want_scores = want_scores
        if calls is not None and one_call:
            calls = FirstCall(calls)
        self._calls = calls
        self._reasoning = reasoning
        self._unfinished = unfinished
        self._one_call = one_call
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._scores: list[tuple[int, TokenLogprob]] = []
        self._tool_calls: list[ToolCall] = []
        self.pending = 0  # tokens since the last piece was taken
        self.pending_alternatives = 0  # likewise, of the scores
        self.billed = 0
        self.logprob = 0.0  # sum over all billed tokens, where the worker sends scores
        self.stop_match: StopMatch | None = None
        self.called = False  # whether the output has called a tool

    def push(self, token_ids: Sequence[int], scores: Sequence[TokenLogprob] = ()) -> bool:
        """Add new tokens, with a score each or none.

        Returns True if the output is `over` after ``billed`` tokens; the rest was dropped.
        """
        # Without anything that can end the output between two tokens all are detokenised at once.
        if self._stops is None and not self._one_call:
            self._push_all(token_ids, scores)
            return False
        for index, token_id in enumerate(token_ids):
            self._push_all((token_id,), scores[index : index + 1])
            if self.over:
                return True
        return False

    @property
    def due(self) -> bool:
        """True if a piece is to be sent now."""
        if not self.pending or (self.pending < self._interval and self.billed != self.pending):
            return False
        # Half a character, or a possible stop string, is nothing to send to a client that wants text only.
        if self._want_token_ids or bool(self._text) or bool(self._scores) or bool(self._tool_calls):
            return True
        return self._reasoning is not None and self._reasoning.pending

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of `billed` that are reasoning."""
        return 0 if self._reasoning is None else self._reasoning.tokens

    @property
    def over(self) -> bool:
        """True if its text ended the output: a stop string, or the only tool call that is allowed."""
        return self._stopped_by_text or (self._one_call and self.called)

    @property
    def stopped(self) -> bool:
        """True if the output ended before its length, by its text or with a stop token."""
        return self.over or self.stop_match is not None

    @property
    def _stopped_by_text(self) -> bool:
        return self.stop_match is not None and self.stop_match.text is not None

    def restore(self, token_ids: Sequence[int]) -> bool:
        """Add tokens that the client has already, which are not sent again.

        Returns False if the output ended before the last of them.
        """
        stopped = self.push(token_ids) and self.billed < len(token_ids)
        self.take()
        return not stopped and self._stop_ids.isdisjoint(token_ids[:-1])

    def finish(self, *, cut: bool = False) -> None:
        """End the output: text held back goes into the last piece, unless a stop string matched.

        ``cut``: the model had not ended, so that bytes of a character at the end are only its beginning, and
        not shown.
        """
        if self._reasoning is not None and not self.over:
            self._add_tokens(self._reasoning.finish())
        if self._detokenizer is not None and not self.over:
            unfinished = self._detokenizer.flush()
            self._add_text("" if cut and self.stop_match is None else unfinished)
            if self._stops is not None and not self.over:
                self._show(self._stops.flush())
        if self._calls is not None:
            last = self._calls.finish()
            if self._unfinished is not None and last.text:
                last = Parsed(calls=last.calls) + self._unfinished.read(last.text, cut=not self.stopped)
            self._show_parsed(last)

    def take(self) -> Delta:
        """Return all that is new, due or not; possibly nothing."""
        delta = Delta(
            "".join(self._text) if self._want_text else "",
            self._token_ids if self._want_token_ids else (),
            self.pending,
            self._scores,
            self._tool_calls,
            "" if self._reasoning is None else self._reasoning.take(),
        )
        self._text, self._token_ids, self._scores, self._tool_calls = [], [], [], []
        self.pending = self.pending_alternatives = 0
        return delta

    def _push_all(self, token_ids: Sequence[int], scores: Sequence[TokenLogprob]) -> None:
        self._token_ids.extend(token_ids)
        self.pending += len(token_ids)
        self.billed += len(token_ids)
        if scores:
            self.logprob += sum(score.logprob for score in scores)
            if self._want_scores:
                self._scores.extend(zip(token_ids, scores, strict=True))
                self.pending_alternatives += sum(1 + len(score.top) for score in scores)
        if token_ids and token_ids[-1] in self._stop_ids:
            self.stop_match = StopMatch(token_id=token_ids[-1])
            if not self._include_stop:
                token_ids = token_ids[:-1]
        self._add_tokens(token_ids if self._reasoning is None else self._reasoning.push(token_ids))

    def _add_tokens(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the answer."""
        if self._detokenizer is None or not token_ids:
            return
        self._add_text(self._detokenizer.push(token_ids))

    def _add_text(self, text: str) -> None:
        if self._reasoning is not None:
            text = self._reasoning.trimmed_answer(text)
        if self._stops is None:
            self._show(text)
            return
        # Early text is searched too: a match that begins in it may end later.
        result = self._stops.push(text, early=self.billed < self._min_tokens)
        self._show(result.text_to_emit)
        if result.matched is not None:
            self.stop_match = StopMatch(text=result.matched)

    def _show(self, text: str) -> None:
        """Add text for the client, or the tool calls in it."""
        if not text:
            return
        if self._calls is None:
            self._text.append(text)
        else:
            self._show_parsed(self._calls.push(text))

    def _show_parsed(self, parsed: Parsed) -> None:
        # Between calls that are all that an output may hold, text is a separator.
        if parsed.text and not (self._unfinished is not None and self._unfinished.forced):
            self._text.append(parsed.text)
        for call in parsed.calls:
            self._add_call(call)

    def _add_call(self, call: ToolCall) -> None:
        """Add a call, or join the piece of one to the piece before it, if that was not taken yet."""
        self.called |= not call.partial
        if call.id or not self._tool_calls:
            if call.id or call.arguments_json:
                self._tool_calls.append(call)
            return
        before = self._tool_calls[-1]
        arguments = before.arguments_json + call.arguments_json
        self._tool_calls[-1] = replace(before, arguments_json=arguments, partial=call.partial)
