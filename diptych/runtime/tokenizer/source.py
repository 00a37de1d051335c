"""Tokenizer of a model file, in one shape for both kinds of file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import tokenizers

from diptych.runtime.settings import StartupError


class UnusableTokenizer(StartupError, ValueError):
    """The model's tokenizer is missing, malformed, or of a kind that this build does not have."""


class AddedToken(NamedTuple):
    """A token matched as a whole string before any pre-tokenizing."""

    token_id: int
    text: str
    control: bool  # true: part of the prompt's structure, never made from a caller's text
    takes_left_space: bool = False
    takes_right_space: bool = False


@dataclass(frozen=True)
class TokenizerSource:
    """Made by `gguf_tokenizer.read` or `hf_tokenizer.read`; `Tokenizer` is built on it."""

    backend: tokenizers.Tokenizer  # encodes control-token text as plain text
    continuation: tokenizers.Tokenizer  # same, for text that follows a control token; often the same object
    added: tuple[AddedToken, ...]
    alphabet: Literal["byte_level", "byte_fallback"]  # how a piece spells its bytes
    strips_first_space: bool  # decoded text loses one leading space (SentencePiece)
    vocab_size: int  # rows of the embedding; ids from here on are invalid
    max_context: int
    eos_token_ids: tuple[int, ...]
    digest: str  # sha256 of all that decides the tokenization, hex
    chat_template: str | None
    tool_template: str | None = None  # in its place for conversations with tools, where there are two
    template_names: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, …
    generation_defaults: Mapping[str, object] = field(default_factory=dict)  # generation_config.json
