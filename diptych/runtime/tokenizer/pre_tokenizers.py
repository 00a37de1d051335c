"""Pre-tokenizers of byte-level BPE by the words with which GGUF files name them (``tokenizer.ggml.pre``).

A word that the table lacks is an error: guessing a pre-tokenizer gives plausible and wrong token ids.
Patterns are those of each model's own tokenizer.json (llama.cpp's ``llama-vocab.cpp`` lists the same, some
rewritten for an engine without Unicode properties); ``ignore_merges`` and the beginning of a text are
llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CL100K: Final = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2: Final = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_PATHS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_O200K: Final = rf"{_CAMEL[0]}{_CONTRACTIONS}?|{_CAMEL[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
_TEKKEN: Final = rf"{_CAMEL[0]}|{_CAMEL[1]}|\p{{N}}|{_PATHS}|{_SPACES}"
_SEED: Final = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING: Final = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_LETTERS: Final = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK: Final = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_LLAMA3_ENDS: Final = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_QWEN_ENDS: Final = ("<|im_end|>", "<|endoftext|>")


class PreTokenizer(NamedTuple):
    """Meaning of one word of ``tokenizer.ggml.pre``."""

    build: Callable[[], Any]
    ignore_merges: bool = (
        False  # a pre-token that is in the vocabulary is that token, whatever the merges say
    )
    composes_unicode: bool = False  # NFC before anything else
    adds_bos: bool = False  # unless the file says otherwise
    ends: tuple[str, ...] = ()  # control tokens that end an output, beside those that the file names


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def split_by(patterns: Sequence[str]) -> Any:
    """Return a pre-tokenizer that isolates the matches of each pattern in turn, then spells bytes."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _splitting(*patterns: str) -> Callable[[], Any]:
    return lambda: split_by(patterns)


_CL100K_WORDS: Final = PreTokenizer(_splitting(_CL100K))
_LLAMA3: Final = PreTokenizer(_splitting(_CL100K), ignore_merges=True, adds_bos=True, ends=_LLAMA3_ENDS)
_QWEN: Final = PreTokenizer(_splitting(_QWEN2), composes_unicode=True, ends=_QWEN_ENDS)
_GPT2: Final = PreTokenizer(_gpt2)
_DIGITS: Final = PreTokenizer(_digits)
_GPT4O: Final = PreTokenizer(_splitting(_O200K), ignore_merges=True)
_V3: Final = PreTokenizer(_splitting(*_DEEPSEEK_V3))

PRE_TOKENIZERS: Final = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": PreTokenizer(_gpt2, composes_unicode=True),
    "exaone4": _GPT2,
    "mpt": _GPT2,
    "jais": _GPT2,
    "gigachat": _GPT2,
    "a.x-4.0": _GPT2,
    "mellum": _GPT2,
    "trillion": _GPT2,
    "granite-docling": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,  # Granite 3 and 4
    "granite": _DIGITS,
    "command-r": PreTokenizer(_digits, composes_unicode=True),
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "mellum2": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _CL100K_WORDS,  # OLMo 2, too
    "smaug-bpe": _CL100K_WORDS,
    "glm4": _CL100K_WORDS,
    "chatglm-bpe": _CL100K_WORDS,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "stablelm2": PreTokenizer(_splitting(_QWEN2)),
    "hunyuan": PreTokenizer(_splitting(_QWEN2)),
    "grok-2": PreTokenizer(_splitting(_QWEN2)),
    "qwen35": PreTokenizer(_splitting(_QWEN35), composes_unicode=True, ends=_QWEN_ENDS),
    "gpt-4o": _GPT4O,
    "llama4": PreTokenizer(_splitting(_O200K), ignore_merges=True, ends=("<|eom|>", "<|eot|>")),
    "kanana2": _GPT4O,
    "minimax-m2": _GPT4O,
    "tekken": PreTokenizer(_splitting(_TEKKEN), ignore_merges=True, adds_bos=True),
    "seed-coder": PreTokenizer(_splitting(_SEED)),
    "bailingmoe": PreTokenizer(_splitting(_BAILING)),
    "bailingmoe2": PreTokenizer(_splitting(_BAILING)),
    "deepseek-llm": PreTokenizer(_splitting(*_DEEPSEEK_LLM)),
    "deepseek-coder": PreTokenizer(_splitting(*_DEEPSEEK_CODER)),
    "deepseek-v3": _V3,
    "hunyuan-dense": _V3,
}
"""The ends are those of each family's generation_config.json, of which most GGUF files name one alone
(those that end a turn in any family: end_tokens.py).
"""
