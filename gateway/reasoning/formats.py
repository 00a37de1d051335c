"""Formats of reasoning, and the choice of a model's format by its chat template and its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from diptych.runtime.settings import StartupError
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.reasoning import harmony
from gateway.reasoning.harmony import HarmonyReasoning
from gateway.reasoning.splitter import ReasoningFormat
from gateway.reasoning.tagged import TaggedReasoning

AUTO: Final = "auto"
NONE: Final = "none"


class UnusableReasoning(StartupError, ValueError):
    """Format that was asked for and that the model's tokenizer does not have."""


@dataclass(frozen=True, slots=True)
class ReasoningRule:
    """Rule by which a format is recognised. A new form is a file with a splitter, and an entry in `RULES`."""

    name: str
    marks: tuple[str, ...]
    """Texts that are one token each in the model's vocabulary."""
    signs: tuple[str, ...]
    """A chat template with one of these in its source uses this format."""
    make: Callable[[tuple[int, ...], Tokenizer], ReasoningFormat]
    """Called with the ids of the marks."""

    def resolve(self, tokenizer: Tokenizer) -> ReasoningFormat | None:
        """Return the format for the model of ``tokenizer``; None if a mark is not one token there."""
        ids = tuple(one for mark in self.marks if (one := tokenizer.id_of(mark)) is not None)
        return self.make(ids, tokenizer) if len(ids) == len(self.marks) else None


def _tagged(name: str, opened: str, closed: str) -> ReasoningRule:
    return ReasoningRule(
        name, (opened, closed), (opened, closed), partial(_make_tagged, name, opened, closed)
    )


def _make_tagged(
    name: str, opened: str, closed: str, ids: tuple[int, ...], tokenizer: Tokenizer
) -> ReasoningFormat:
    open_id, close_id = ids
    return TaggedReasoning(name, opened, closed, open_id, close_id, tokenizer)


RULES: Final = (
    ReasoningRule("harmony", harmony.MARKS, (harmony.CHANNEL,), HarmonyReasoning),
    _tagged("mistral", "[THINK]", "[/THINK]"),
    _tagged("seed_oss", "<seed:think>", "</seed:think>"),
    _tagged("think", "<think>", "</think>"),
)
NAMES: Final = tuple(rule.name for rule in RULES)


def format_of(template: str, tokenizer: Tokenizer, chosen: str = AUTO) -> ReasoningFormat | None:
    """Return the format of a model's reasoning.

    Args:
        template: source of its chat template.
        tokenizer: of the model.
        chosen: the name of a format, `AUTO` for the one that template and tokenizer have, if any, or `NONE`.

    Raises `UnusableReasoning`.
    """
    if chosen == NONE:
        return None
    for rule in RULES:
        if chosen == rule.name or (chosen == AUTO and any(sign in template for sign in rule.signs)):
            found = rule.resolve(tokenizer)
            if found is not None:
                return found
            if chosen != AUTO:
                marks = " and ".join(rule.marks)
                raise UnusableReasoning(
                    f"--reasoning-parser {chosen}: the model's tokenizer has no tokens {marks}"
                )
    return None
