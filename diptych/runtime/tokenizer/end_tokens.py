"""Tokens that end an output: the union of all that a model's files name as an end.

A chat fine-tune often keeps its base's `eos_token_id` in generation_config.json and config.json and names the
end of a turn, such as ``<|im_end|>``, only in its tokenizer or its chat template. A model that is stopped at
the first of these alone runs on into turns that it invents. Gateway and workers read their end tokens here
(`TokenizerSource.eos_token_ids`): the gateway's become a request's stop ids, the workers' end a grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from diptych.runtime.tokenizer.source import AddedToken

_TURN_ENDS: Final = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<end_of_turn>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|endofturn|>",
        "[|endofturn|]",
        "<end_of_utterance>",
        "<|return|>",
        "<|call|>",
        "<|end|>",
    }
)
"""Control tokens with which models end a turn; llama.cpp knows most of them by these texts, too."""
_ENDS_A_MESSAGE: Final = "<|end|>"
_ENDS_ALL_MESSAGES: Final = "<|return|>"
"""Ends of the Harmony format, in which an answer is several messages with an end of its own each."""


def turn_end_ids(added: Iterable[AddedToken], templates: Sequence[str]) -> list[int]:
    """Return the control tokens that end a turn and that one of `templates` writes, all if there is none."""
    found = {token.text: token.token_id for token in added if token.control and token.text in _TURN_ENDS}
    if _ENDS_ALL_MESSAGES in found:
        found.pop(_ENDS_A_MESSAGE, None)
    return [
        token_id
        for text, token_id in found.items()
        if not templates or any(text in template for template in templates)
    ]


def declared_ids(value: object) -> list[int]:
    """Return the ids of an `eos_token_id` of a JSON file: a number, a list of numbers, or nothing."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def union(ids: Iterable[int | None], vocab_size: int) -> tuple[int, ...]:
    """Return `ids` once each, in order, without what the model cannot write: no worker can forbid that."""
    return tuple(dict.fromkeys(one for one in ids if one is not None and 0 <= one < vocab_size))
