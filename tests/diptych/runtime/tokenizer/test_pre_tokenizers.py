"""Pre-tokenizers by name: each splits as its pattern says, and each word of a family means the same."""

from __future__ import annotations

import pytest

from diptych.runtime.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from tests.diptych.runtime.tokenizer.sample_texts import texts

TEXT = "I'LL pay 12345 for HTMLParser  x\n\n好的 a/b/\n"

CASES = {
    "gpt-2": ["I", "'", "LL", " pay", " 12345", " for", " HTMLParser", " ", " x", "\n"],
    "smollm": ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " for", " HTMLParser", " ", " x"],
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "45", " for", " HTMLParser", " ", " x", "\n\n", "好的"],
    "qwen2": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " for", " HTMLParser", " ", " x", "\n\n"],
    "gpt-4o": ["I'LL", " pay", " ", "123", "45", " for", " HTMLParser", " ", " x", "\n\n", "好的"],
    "tekken": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " for", " HTMLParser", " ", " x", "\n\n"],
    "deepseek-v3": ["I", "'LL", " pay", " ", "123", "45", " for", " HTMLParser", " ", " x", "\n\n", "好的"],
    "deepseek-llm": [
        "I",
        "'",
        "LL",
        " pay",
        " ",
        "12345",
        " for",
        " HTMLParser",
        " ",
        " x",
        "\n",
        "\n",
        "好的",
    ],
    "deepseek-coder": [
        "I",
        "'",
        "LL",
        " pay",
        " ",
        "1",
        "2",
        "3",
        "4",
        "5",
        " for",
        " HTMLParser",
        " ",
        " x",
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_pre_tokenizer_splits_as_its_pattern_says(name: str) -> None:
    assert _split(name, TEXT)[: len(CASES[name])] == CASES[name]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizer_loses_nothing_of_a_text(name: str) -> None:
    for text in texts():
        assert "".join(_split(name, text)) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["llama3", "llama-v3", "llama-bpe", "falcon3"], TEXT),
        (["glm4", "chatglm-bpe", "dbrx"], TEXT),
        (["qwen2", "deepseek-r1-qwen"], TEXT),
        (["starcoder", "refact", "granite", "command-r"], TEXT),
        (["gpt-2", "phi-2", "olmo", "exaone4"], TEXT),
    ],
)
def test_words_of_one_family_mean_the_same(names: list[str], text: str) -> None:
    assert len({tuple(_split(name, text)) for name in names}) == 1


def _split(name: str, text: str) -> list[str]:
    found: list[tuple[str, tuple[int, int]]] = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    # A character of several bytes may be cut into several parts of the same span.
    return [text[begin:end] for begin, end in dict.fromkeys(span for _, span in found)]
