"""The tokenizer inside a GGUF file, rebuilt from vocabulary, scores or merges, and token types.

Two kinds are understood (``tokenizer.ggml.model``): ``gpt2``, byte-level BPE with merges, whose pre-tokenizer
the file names by a word (pre_tokenizers.py), and ``llama``, a SentencePiece vocabulary with scores
(sentencepiece.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import tokenizers
from tokenizers import models, normalizers, processors

from diptych.runtime.gguf_split import first_part
from diptych.runtime.model_context import gguf_context
from diptych.runtime.tokenizer import sentencepiece
from diptych.runtime.tokenizer.end_tokens import turn_end_ids, union
from diptych.runtime.tokenizer.gguf_entries import GgufEntries
from diptych.runtime.tokenizer.gguf_metadata import MalformedGguf, read_metadata
from diptych.runtime.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from diptych.runtime.tokenizer.sentencepiece import Piece, PieceKind, add_tokens
from diptych.runtime.tokenizer.source import AddedToken, TokenizerSource, UnusableTokenizer

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_EOS_KEYS: Final = ("eos", "eot", "eom")
_PHI3: Final = ("phi-3", "phi3")
_PHI3_TAKE_NO_SPACE: Final = ("<unk>", "<s>", "<|endoftext|>")


class _Vocabulary(NamedTuple):
    """Vocabulary of one kind of file."""

    backend: tokenizers.Tokenizer
    added: tuple[AddedToken, ...]
    alphabet: Literal["byte_level", "byte_fallback"]
    size: int
    decided_by: tuple[Sequence[str], ...]  # all that a tokenization depends on
    adds_bos: bool
    bos: int | None
    eos: int | None
    texts: Sequence[str]
    ends: tuple[str, ...] = ()
    strips_first_space: bool = False


def read(path: Path) -> TokenizerSource:
    """Return the tokenizer of the GGUF file at ``path``. Raises `UnusableTokenizer` or `OSError`."""
    try:
        return _build(GgufEntries(read_metadata(first_part(path))))
    except MalformedGguf as error:
        raise UnusableTokenizer(str(error)) from error


def _build(entries: GgufEntries) -> TokenizerSource:
    found = _vocabulary(entries)
    leads_with_bos = found.adds_bos and found.bos is not None
    if leads_with_bos:
        found.backend.post_processor = processors.TemplateProcessing(
            single="BOS:0 $A:0", special_tokens=[("BOS", found.bos)]
        )
    named = [*(entries.special_id(name, found.size) for name in _EOS_KEYS), found.eos]
    stops = [one for one in named if one is not None]
    stops += [token.token_id for token in found.added if token.control and token.text in found.ends]
    default, with_tools = (entries.text(f"tokenizer.chat_template{kind}") for kind in ("", ".tool_use"))
    templates = [template for template in (default, with_tools) if template is not None]
    stops += turn_end_ids(found.added, templates)
    return TokenizerSource(
        backend=found.backend,
        continuation=found.backend,
        added=found.added,
        alphabet=found.alphabet,
        strips_first_space=found.strips_first_space,
        vocab_size=found.size,
        max_context=_max_context(entries),
        eos_token_ids=union(stops, found.size),
        digest=_digest(*found.decided_by, [str(found.adds_bos)]),
        chat_template=default,
        tool_template=with_tools,
        template_names={
            name: found.texts[token_id]
            for name, token_id in (("bos_token", found.bos), ("eos_token", found.eos))
            if token_id is not None
        },
    )


def _vocabulary(entries: GgufEntries) -> _Vocabulary:
    kind = entries.text("tokenizer.ggml.model")
    if kind == _BYTE_LEVEL:
        return _byte_level(entries)
    if kind == _SENTENCEPIECE:
        return _sentencepiece(entries)
    raise UnusableTokenizer(
        f"tokenizer.ggml.model is {kind!r}; this build has {_BYTE_LEVEL} (byte-level BPE) and "
        f"{_SENTENCEPIECE} (SentencePiece)"
    )


def _byte_level(entries: GgufEntries) -> _Vocabulary:
    pre_name = entries.text("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(pre_name or "")
    if pre is None:
        raise UnusableTokenizer(
            f"tokenizer.ggml.pre is {pre_name!r}; this build has {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    tokens, types = _tokens_and_types(entries)
    merges = entries.texts("tokenizer.ggml.merges")
    added = tuple(
        AddedToken(token_id, tokens[token_id], control=token_type == PieceKind.CONTROL)
        for token_id, token_type in enumerate(types)
        if token_type in (PieceKind.CONTROL, PieceKind.USER_DEFINED)
    )
    add_bos = entries.flag("tokenizer.ggml.add_bos_token")
    adds_bos = pre.adds_bos if add_bos is None else add_bos
    return _Vocabulary(
        backend=_byte_level_backend(pre, tokens, merges, added),
        added=added,
        alphabet="byte_level",
        size=len(tokens),
        decided_by=([pre_name or ""], tokens, [str(kind) for kind in types], merges),
        adds_bos=adds_bos,
        bos=entries.special_id("bos", len(tokens)),
        eos=entries.special_id("eos", len(tokens)),
        texts=tokens,
        ends=pre.ends,
    )


def _sentencepiece(entries: GgufEntries) -> _Vocabulary:
    tokens, types = _tokens_and_types(entries)
    scores = entries.scores("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise UnusableTokenizer(f"{len(tokens)} tokens but {len(scores)} scores")
    # A file without types is one of before they were written: its first three tokens have them by place.
    types = types or [PieceKind.UNKNOWN, *[PieceKind.CONTROL] * 2, *[PieceKind.NORMAL] * (len(tokens) - 3)]
    pieces = sentencepiece.plain_pieces(map(Piece, tokens, map(float, scores), types))
    adds_prefix = entries.flag("tokenizer.ggml.add_space_prefix") is not False
    add_bos = entries.flag("tokenizer.ggml.add_bos_token")
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    bos, eos = (
        ids.get(text) if (named := entries.special_id(name, len(tokens))) is None else named
        for name, text in (("bos", "<s>"), ("eos", "</s>"))
    )
    return _Vocabulary(
        backend=sentencepiece.build(pieces, "always" if adds_prefix else "none"),
        added=_taking_spaces(entries, sentencepiece.added_tokens(pieces)),
        alphabet="byte_fallback",
        size=len(tokens),
        decided_by=(
            [_SENTENCEPIECE, str(adds_prefix)],
            tokens,
            [str(kind) for kind in types],
            list(map(repr, scores)),
        ),
        adds_bos=add_bos is not False,
        bos=bos,
        eos=eos,
        texts=tokens,
        strips_first_space=adds_prefix,
    )


def _tokens_and_types(entries: GgufEntries) -> tuple[list[str], list[int]]:
    tokens, types = entries.texts("tokenizer.ggml.tokens"), entries.numbers("tokenizer.ggml.token_type")
    if types and len(types) != len(tokens):
        raise UnusableTokenizer(f"{len(tokens)} tokens but {len(types)} token types")
    return tokens, types


def _taking_spaces(entries: GgufEntries, added: tuple[AddedToken, ...]) -> tuple[AddedToken, ...]:
    """Return `added` with the white space that Phi-3's control tokens take in, which no key of GGUF says.

    llama.cpp, too, knows these files by their name.
    """
    name = (entries.text("general.name") or "").lower()
    if not any(one in name for one in _PHI3):
        return added
    return tuple(
        token._replace(takes_right_space=True)
        if token.control and token.text not in _PHI3_TAKE_NO_SPACE
        else token
        for token in added
    )


def _byte_level_backend(
    pre: PreTokenizer, tokens: list[str], merges: list[str], added: tuple[AddedToken, ...]
) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UnusableTokenizer("the vocabulary holds a token twice")
    pairs = [_pair(merge) for merge in merges]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the binding raises bare Exception for a merge of unknown tokens
        raise UnusableTokenizer(f"merges do not fit the vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if pre.composes_unicode:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    add_tokens(backend, added)
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise UnusableTokenizer("a merge is not a pair of tokens")
    return left, right


def _max_context(entries: GgufEntries) -> int:
    architecture = entries.text("general.architecture")
    entries.number(f"{architecture}.context_length")  # of the right type
    if (length := gguf_context(entries.values)) is None:
        raise UnusableTokenizer(f"{architecture}.context_length is missing")
    return length


def _digest(*parts: Sequence[str]) -> str:
    """Length-prefixed parts, so that no two vocabularies can spell the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        data = "\0".join(part).encode("utf-8")
        digest.update(f"{len(part)}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()
