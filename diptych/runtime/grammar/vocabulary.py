"""A model's vocabulary as llguidance wants it: the bytes of every token."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer

from diptych.runtime.tokenizer.tokenizer import Tokenizer


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Build the trie over all tokens; about 0.25 s for 49,152 of them.

    Control tokens spell nothing: no grammar lets one come, but for the ends of sequence once the output may
    end. Ids that only pad the embedding have no bytes and never come either. Raises ValueError for a model
    without an end of sequence: its outputs could not end where the grammar does.
    """
    if not tokenizer.eos_token_ids:
        raise ValueError("the model has no end-of-sequence token")
    found: LLTokenizer = LLTokenizer(
        _Vocabulary(tokenizer),  # type: ignore[arg-type]  # asks for a class of its own; any object of this shape will do
        n_vocab=tokenizer.vocab_size,
        eos_token=list(tokenizer.eos_token_ids),
    )
    return found


class _Vocabulary:
    """llguidance's protocol for a tokenizer."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.tokens: Sequence[bytes] = [tokenizer.piece(token_id) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if tokenizer.is_special(token_id)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
