"""The tokenizer inside a GGUF file: byte-level BPE, rebuilt from vocabulary, merges and token types.

GGUF names the pre-tokenizer only by a word (``tokenizer.ggml.pre``); the table below spells out what each
word means. A word it lacks is an error: guessing a pre-tokenizer gives plausible and wrong token ids.
Patterns are those of each model's own tokenizer.json (llama.cpp's ``llama-vocab.cpp`` lists the same).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from diptych.runtime.model_context import gguf_context
from diptych.runtime.tokenizer.end_tokens import turn_end_ids, union
from diptych.runtime.tokenizer.gguf_metadata import MalformedGguf, Value, read_metadata
from diptych.runtime.tokenizer.source import AddedToken, TokenizerSource, UnusableTokenizer

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_EOS_KEYS: Final = ("eos", "eot", "eom")

_LLAMA3_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN: Final = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


class _Pre(NamedTuple):
    pre_tokenizer: Callable[[], Any]
    ignore_merges: bool = (
        False  # a pre-token that is in the vocabulary is that token, whatever the merges say
    )
    composes_unicode: bool = False  # NFC before anything else
    adds_bos: bool = False  # unless the file says otherwise
    ends: tuple[str, ...] = ()  # control tokens that end an output, beside those that the file names


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(pattern: str) -> Any:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


_PRE: Final = {
    "gpt-2": _Pre(_gpt2),
    "smollm": _Pre(_smollm),
    "llama-bpe": _Pre(
        lambda: _pattern(_LLAMA3_PATTERN),
        ignore_merges=True,
        adds_bos=True,
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "qwen2": _Pre(
        lambda: _pattern(_QWEN2_PATTERN), composes_unicode=True, ends=("<|im_end|>", "<|endoftext|>")
    ),
}
"""The ends are those of each family's generation_config.json, of which most GGUF files name one alone
(those that end a turn in any family: end_tokens.py).
"""


def read(path: Path) -> TokenizerSource:
    """Return the tokenizer of the GGUF file at ``path``. Raises `UnusableTokenizer` or `OSError`."""
    try:
        return _build(_Entries(read_metadata(path)))
    except MalformedGguf as error:
        raise UnusableTokenizer(str(error)) from error


class _Entries:
    """Typed access to GGUF metadata; a key of the wrong type is a malformed file."""

    def __init__(self, values: dict[str, Value]) -> None:
        self.values = values

    def text(self, key: str) -> str | None:
        value: str | None = self._get(key, str)
        return value

    def flag(self, key: str) -> bool | None:
        value: bool | None = self._get(key, bool)
        return value

    def number(self, key: str) -> int | None:
        value: int | None = self._get(key, int)
        return value

    def texts(self, key: str) -> list[str]:
        values: list[str] | None = self._get(key, list)
        if not values or not isinstance(values[0], str):
            raise UnusableTokenizer(f"{key} is missing or holds no strings")
        return values

    def numbers(self, key: str) -> list[int]:
        values: list[int] | None = self._get(key, list)
        if values is not None and values and not isinstance(values[0], int):
            raise UnusableTokenizer(f"{key} holds no integers")
        return values or []

    def _get(self, key: str, kind: type) -> Any:
        value = self.values.get(key)
        # bool is an int to Python; a flag where a number belongs is still a mistake.
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise UnusableTokenizer(f"{key} should be {kind.__name__}, is {type(value).__name__}")
        return value


def _build(entries: _Entries) -> TokenizerSource:
    kind, pre_name = entries.text("tokenizer.ggml.model"), entries.text("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise UnusableTokenizer(f"tokenizer.ggml.model is {kind!r}; this build has gpt2 (byte-level BPE)")
    pre = _PRE.get(pre_name or "")
    if pre is None:
        raise UnusableTokenizer(
            f"tokenizer.ggml.pre is {pre_name!r}; this build has {', '.join(sorted(_PRE))}"
        )
    tokens = entries.texts("tokenizer.ggml.tokens")
    merges = entries.texts("tokenizer.ggml.merges")
    types = entries.numbers("tokenizer.ggml.token_type")
    if types and len(types) != len(tokens):
        raise UnusableTokenizer(f"{len(tokens)} tokens but {len(types)} token types")
    added = tuple(
        AddedToken(token_id, tokens[token_id], control=token_type == _CONTROL)
        for token_id, token_type in enumerate(types)
        if token_type in (_CONTROL, _USER_DEFINED)
    )
    bos, eos = _special(entries, "bos", len(tokens)), _special(entries, "eos", len(tokens))
    add_bos = entries.flag("tokenizer.ggml.add_bos_token")
    leads_with_bos = pre.adds_bos if add_bos is None else add_bos
    backend = _backend(pre, tokens, merges, added)
    if leads_with_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single="BOS:0 $A:0", special_tokens=[("BOS", bos)]
        )
    stops = [found for name in _EOS_KEYS if (found := _special(entries, name, len(tokens))) is not None]
    stops += [token.token_id for token in added if token.control and token.text in pre.ends]
    default, with_tools = (entries.text(f"tokenizer.chat_template{kind}") for kind in ("", ".tool_use"))
    stops += turn_end_ids(added, [template for template in (default, with_tools) if template is not None])
    return TokenizerSource(
        backend=backend,
        continuation=backend,
        added=added,
        alphabet="byte_level",
        strips_first_space=False,
        vocab_size=len(tokens),
        max_context=_max_context(entries),
        eos_token_ids=union(stops, len(tokens)),
        digest=_digest(pre_name or "", tokens, types, merges, leads_with_bos),
        chat_template=default,
        tool_template=with_tools,
        template_names={
            name: tokens[found]
            for name, found in (("bos_token", bos), ("eos_token", eos))
            if found is not None
        },
    )


def _backend(
    pre: _Pre, tokens: list[str], merges: list[str], added: tuple[AddedToken, ...]
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
    backend.pre_tokenizer = pre.pre_tokenizer()
    for token in added:
        entry = tokenizers.AddedToken(token.text, special=token.control, normalized=False)
        backend.add_special_tokens([entry]) if token.control else backend.add_tokens([entry])
    backend.encode_special_tokens = True
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise UnusableTokenizer("a merge is not a pair of tokens")
    return left, right


def _special(entries: _Entries, name: str, vocab_size: int) -> int | None:
    token_id = entries.number(f"tokenizer.ggml.{name}_token_id")
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise UnusableTokenizer(f"tokenizer.ggml.{name}_token_id is outside the vocabulary")
    return token_id


def _max_context(entries: _Entries) -> int:
    architecture = entries.text("general.architecture")
    entries.number(f"{architecture}.context_length")  # of the right type
    if (length := gguf_context(entries.values)) is None:
        raise UnusableTokenizer(f"{architecture}.context_length is missing")
    return length


def _digest(pre: str, tokens: list[str], types: list[int], merges: list[str], leads_with_bos: bool) -> str:
    """Length-prefixed parts, so that no two vocabularies can spell the same bytes."""
    digest = hashlib.sha256()
    for part in ([pre], tokens, [str(kind) for kind in types], merges, [str(leads_with_bos)]):
        data = "\0".join(part).encode("utf-8")
        digest.update(f"{len(part)}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()
