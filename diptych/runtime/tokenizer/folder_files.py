"""The vocabulary of a Hugging Face folder in any of its forms, as the content of a ``tokenizer.json``.

Beside tokenizer.json itself: ``tekken.json`` (Mistral), ``tokenizer.model`` (SentencePiece) and
``vocab.json`` with ``merges.txt`` (byte-level BPE), whose tokenizer the library then builds as it would from
a tokenizer.json with the same meaning. Tokens that were added to a vocabulary stand in tokenizer_config.json
or added_tokens.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from diptych.runtime.model_files import VOCABULARY_FILES
from diptych.runtime.tokenizer import sentencepiece, sentencepiece_model, tekken
from diptych.runtime.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from diptych.runtime.tokenizer.sentencepiece import SPACE, PieceKind, PrefixSpace
from diptych.runtime.tokenizer.source import AddedToken, UnusableTokenizer

Json = dict[str, Any]

TOKENIZER_JSON: Final = "tokenizer.json"
TEKKEN, SENTENCEPIECE, VOCABULARY, MERGES = "tekken.json", "tokenizer.model", "vocab.json", "merges.txt"
FORMS: Final = VOCABULARY_FILES

_PRE_OF_CLASS: Final = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
"""Pre-tokenizers of vocab.json by tokenizer_class of tokenizer_config.json; no file names them."""
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class FolderVocabulary(NamedTuple):
    """The vocabulary of a folder."""

    data: bytes
    """Content of a tokenizer.json."""
    names: dict[str, str]
    """Names of special tokens that its form has by itself, where tokenizer_config.json gives none."""


def read_vocabulary(folder: Path, tokenizer_config: Json) -> FolderVocabulary:
    """Return the vocabulary of `folder`. Raises `UnusableTokenizer` or `OSError`.

    `tokenizer_config`: the content of tokenizer_config.json.
    """
    form = next((name for name in FORMS if (folder / name).is_file()), None)
    if form == TOKENIZER_JSON:
        return FolderVocabulary((folder / TOKENIZER_JSON).read_bytes(), {})
    if form == TEKKEN:
        backend = tekken.build(json_object(TEKKEN, (folder / TEKKEN).read_bytes()))
    elif form == SENTENCEPIECE:
        backend = _sentencepiece((folder / SENTENCEPIECE).read_bytes(), tokenizer_config)
    elif form == VOCABULARY:
        backend = _vocabulary_and_merges(folder, tokenizer_config)
    else:
        raise UnusableTokenizer(f"{folder} has no {TOKENIZER_JSON}, nor {', '.join(FORMS[1:])}")
    if form != TEKKEN:
        _add_declared_tokens(backend, folder, tokenizer_config)
    names = {} if form == VOCABULARY else _own_names(backend)
    return FolderVocabulary(backend.to_str().encode("utf-8"), names)


def _own_names(backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Return the beginning and the end of a text that both of Mistral's forms, and Llama's, have."""
    texts = {"bos_token": tekken.BOS, "eos_token": tekken.EOS}
    return {name: text for name, text in texts.items() if backend.token_to_id(text) is not None}


def json_object(name: str, data: bytes) -> Json:
    """Return the object in `data`. Raises `UnusableTokenizer`, which names the file as `name`."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise UnusableTokenizer(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnusableTokenizer(f"{name} holds no object")
    return value


def _sentencepiece(data: bytes, tokenizer_config: Json) -> tokenizers.Tokenizer:
    """Return the tokenizer of a ``tokenizer.model``.

    transformers' `legacy`, its default, puts the space before each text between control tokens, as
    SentencePiece does; without it the space comes before the first text alone.
    """
    model = sentencepiece_model.parse(data)
    pieces = sentencepiece.plain_pieces(model.pieces)
    prefix: PrefixSpace = "none"
    if model.adds_prefix_space and tokenizer_config.get("add_prefix_space") is not False:
        prefix = "first" if tokenizer_config.get("legacy") is False else "always"
    backend = sentencepiece.build(pieces, prefix)
    bos = next((piece.text for piece in pieces if piece.kind == PieceKind.CONTROL), None)
    named = _token_text(tokenizer_config.get("bos_token")) or bos
    token_id = None if named is None else backend.token_to_id(named)
    if token_id is not None and tokenizer_config.get("add_bos_token") is not False:
        backend.post_processor = processors.TemplateProcessing(
            single="BOS:0 $A:0", special_tokens=[("BOS", token_id)]
        )
    return backend


def _vocabulary_and_merges(folder: Path, tokenizer_config: Json) -> tokenizers.Tokenizer:
    named = str(tokenizer_config.get("tokenizer_class")).removesuffix("Fast")
    if named not in _PRE_OF_CLASS:
        raise UnusableTokenizer(
            f"tokenizer_config.json's tokenizer_class is {named!r}; {VOCABULARY} is read for "
            f"{' and '.join(_PRE_OF_CLASS)}: get {TOKENIZER_JSON}"
        )
    if not (folder / MERGES).is_file():
        raise UnusableTokenizer(f"{folder} has {VOCABULARY} but no {MERGES}")
    pre = PRE_TOKENIZERS[_PRE_OF_CLASS[named]]
    vocab = json_object(VOCABULARY, (folder / VOCABULARY).read_bytes())
    lines = (folder / MERGES).read_text(encoding="utf-8").split("\n")
    merges = [_pair(line) for line in lines if line and not line.startswith("#version")]
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the binding raises bare Exception
        raise UnusableTokenizer(f"{MERGES} does not fit {VOCABULARY}: {error}") from error
    if pre.composes_unicode:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not (left and space and right) or " " in right:
        raise UnusableTokenizer(f"{MERGES}: {line!r} is no pair of tokens")
    return left, right


def _add_declared_tokens(backend: tokenizers.Tokenizer, folder: Path, tokenizer_config: Json) -> None:
    """Add the tokens that stand beside the vocabulary, in the order of their ids.

    The library numbers new tokens on from its vocabulary, and knows those that are in it already.
    """
    special = {_token_text(tokenizer_config.get(name)) for name in _SPECIAL_NAMES}
    declared = tokenizer_config.get("added_tokens_decoder")
    listed: dict[int, AddedToken] = {}
    if isinstance(declared, dict):
        listed = {int(token_id): _declared(int(token_id), entry) for token_id, entry in declared.items()}
    elif (folder / "added_tokens.json").is_file():
        names = json_object("added_tokens.json", (folder / "added_tokens.json").read_bytes())
        listed = {int(at): AddedToken(int(at), text, control=text in special) for text, at in names.items()}
    for token_id in sorted(listed):
        token = listed[token_id]
        spelled = token.text.replace(SPACE, " ")
        if backend.id_to_token(token_id) == spelled:  # a user-defined run of spaces
            token = token._replace(text=spelled)
        sentencepiece.add_tokens(backend, [token])
        if backend.token_to_id(token.text) != token_id:
            raise UnusableTokenizer(
                f"added token {token.text!r} has the id {token_id}, where the vocabulary holds another"
            )


def _declared(token_id: int, entry: Json) -> AddedToken:
    text = _token_text(entry)
    if text is None:
        raise UnusableTokenizer(f"tokenizer_config.json: added token {token_id} has no content")
    return AddedToken(
        token_id,
        text,
        control=bool(entry.get("special")),
        takes_left_space=bool(entry.get("lstrip")),
        takes_right_space=bool(entry.get("rstrip")),
    )


def _token_text(entry: object) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
