"""Reasoning of one request: the model's format, and where the output begins."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.runtime.grammar.reasoning_span import ReasoningSpan
from gateway.reasoning.splitter import ReasoningFormat, ReasoningSplitter, Start


@dataclass(frozen=True, slots=True)
class RequestReasoning:
    """Reasoning that an output may begin with."""

    form: ReasoningFormat
    start: Start

    @classmethod
    def after(cls, prompt: str, form: ReasoningFormat | None) -> RequestReasoning | None:
        """Return what the output after ``prompt``, or its end, may begin with; None if that is an answer."""
        if form is None:
            return None
        start = form.start(prompt)
        return None if start is Start.CLOSED else cls(form, start)

    @property
    def key(self) -> tuple[str, str]:
        """The values that an output depends on."""
        return self.form.name, self.start.name

    def splitter(self, *, constrained: bool) -> ReasoningSplitter:
        """Return a new splitter of an output."""
        return self.form.splitter(self.start, constrained=constrained)

    def span(self, *, forced: bool) -> ReasoningSpan:
        """Return the span that a grammar begins after."""
        return self.form.span(self.start, forced=forced)
