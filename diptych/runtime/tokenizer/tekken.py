"""Tekken, Mistral's own form of a byte-level BPE vocabulary, as a tokenizer of Hugging Face's library.

``tekken.json`` lists tokens as bytes in the order in which tiktoken joins them; their ids begin behind those
of the control tokens. Format: github.com/mistralai/mistral-common, tokens/tokenizers/tekken.py.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, processors

from diptych.runtime.tokenizer.byte_level import spell_bytes
from diptych.runtime.tokenizer.pre_tokenizers import split_by
from diptych.runtime.tokenizer.sentencepiece import add_tokens
from diptych.runtime.tokenizer.source import AddedToken, UnusableTokenizer

_NAME: Final = "tekken.json"
_UNNAMED_SPECIAL_TOKENS: Final = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
"""Control tokens of files up to version 7, which do not list them."""
BOS: Final = "<s>"
EOS: Final = "</s>"


def build(content: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tekken.json. Raises `UnusableTokenizer`."""
    try:
        config = content["config"]
        num_special, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        pattern = str(config["pattern"])
        ranks = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"][: size - num_special]]
        special = _special_tokens(content.get("special_tokens"), num_special)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise UnusableTokenizer(f"{_NAME} is damaged or of another form: {error!r}") from error
    if len(ranks) != size - num_special or len(set(ranks)) != len(ranks):
        raise UnusableTokenizer(f"{_NAME} holds a token twice, or fewer than its config says")
    spelled = [spell_bytes(token) for token in ranks]
    vocab = {text: token_id for token_id, text in enumerate([*special, *spelled])}
    if len(vocab) != size:
        raise UnusableTokenizer(f"{_NAME} holds a token twice")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges_of_ranks(spelled), ignore_merges=True)
    )
    backend.pre_tokenizer = split_by([pattern])
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, [AddedToken(at, text, control=True) for at, text in enumerate(special)])
    if BOS in special:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, special.index(BOS))]
        )
    return backend


def merges_of_ranks(spelled: Sequence[str]) -> list[tuple[str, str]]:
    """Return the merges with the meaning of tiktoken's ranks: of all pairs, the one of the lowest rank."""
    ranks = {text: rank for rank, text in enumerate(spelled)}
    merges: list[tuple[str, str]] = []
    for text in spelled:
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs = [(ranks[left], ranks[right]) for left, right in cuts if left in ranks and right in ranks]
        merges.extend((spelled[left], spelled[right]) for left, right in sorted(pairs))
    return merges


def _special_tokens(listed: Any, count: int) -> list[str]:
    named = list(_UNNAMED_SPECIAL_TOKENS) if listed is None else [""] * len(listed)
    for entry in listed or ():
        named[int(entry["rank"])] = str(entry["token_str"])
    texts = [*named, *(f"<SPECIAL_{token_id}>" for token_id in range(len(named), count))]
    if len(texts) != count or len(set(texts)) != count:
        raise ValueError("special_tokens do not fit default_num_special_tokens")
    return texts
