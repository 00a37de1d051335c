"""Falcon 3's tokenizer, from folders and GGUF files, against Hugging Face's library.

No package ships the real vocabulary. This one is trained here and laid out as the real one is: reserved words
and the end come first and the padding after them, there is no beginning of a text, digits go in threes, and a
word of the vocabulary is one token whatever the merges say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.output.detokenizer import Detokenizer
from tests.diptych.runtime.tokenizer.sample_texts import texts
from tests.diptych.runtime.tokenizer.small_models import write_folder, write_gguf
from tests.diptych.runtime.tokenizer.test_gguf_tokenizer import LLAMA3

END, END_ID, PADDING, PADDING_ID = "<|endoftext|>", 11, "<|pad|>", 40
RESERVED = [
    *(f">>{word}<<" for word in ("TITLE", "ABSTRACT", "INTRODUCTION", "SUMMARY", "COMMENT", "ANSWER")),
    *(f">>{word}<<" for word in ("QUESTION", "DOMAIN")),
    *(f">>UNUSED_{number}<<" for number in range(100, 103)),
    END,
    *(f">>UNUSED_{number}<<" for number in range(103, 131)),
    PADDING,
]
SPECIAL = [
    ">>TITLE<<A story",
    "a >>QUESTION<< b",
    ">>TITLE",
    f"the end{END}",
    f"{PADDING}{PADDING}x",
    ">>UNUSED_103<<",
]


def trained(pre_tokenizer: Any) -> tokenizers.Tokenizer:
    """Return a tokenizer trained on the texts that are compared, and on the words of two others alone."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=RESERVED, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts()[::2], trainer)
    spec = json.loads(made.to_str())
    # A word without merges that make it, as llama.cpp's files have some: it is a token all the same.
    spec["model"]["vocab"]["Ġirreducible"] = len(spec["model"]["vocab"])
    again = tokenizers.Tokenizer.from_str(json.dumps(spec))
    again.encode_special_tokens = True
    return again


def falcon3() -> Any:
    """Return the splits of Falcon 3."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def falcon() -> Any:
    """Return the splits of the first Falcon, which a folder may bring in its tokenizer.json."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )


@pytest.fixture(scope="module")
def real() -> tokenizers.Tokenizer:
    return trained(falcon3())


def gguf_twin(path: Path, real: tokenizers.Tokenizer, pre: str = "falcon3", **keys: Any) -> Tokenizer:
    """Write and load the converter's file: all reserved words control tokens, an end, no beginning."""
    kinds = [3 if token_id < len(RESERVED) else 1 for token_id in range(real.get_vocab_size())]
    fields: dict[str, Any] = {
        "token_type": kinds,
        "eos_token_id": END_ID,
        "padding_token_id": PADDING_ID,
        **keys,
    }
    return Tokenizer.load(write_gguf(path, real, pre, without="bos_token_id", **fields))


def differences(ours: Tokenizer, real: tokenizers.Tokenizer) -> list[str]:
    """Return the texts whose ids, decoded text or streamed text are others."""
    found = []
    for text in [*texts(), *SPECIAL, " irreducible"]:
        ids = real.encode(text, add_special_tokens=False).ids
        shown = real.decode(ids, skip_special_tokens=True)
        stream = Detokenizer(ours, skip_special=True)
        streamed = "".join(stream.push([one]) for one in ids) + stream.flush()
        if (ours.encode(text), ours.decode(ids, skip_special=True), streamed) != (ids, shown, shown):
            found.append(text)
    return found


def test_layout_is_the_real_ones(real: tokenizers.Tokenizer) -> None:
    assert len(set(texts())) >= 200
    assert (real.token_to_id(END), real.token_to_id(PADDING)) == (END_ID, PADDING_ID)
    assert len(real.encode(" irreducible").ids) == 1


@pytest.mark.parametrize("splits", [falcon3, falcon])
def test_folder_equals_the_library(tmp_path: Path, splits: Any) -> None:
    real = trained(splits())
    config = {"eos_token": END, "pad_token": PADDING, "tokenizer_class": "PreTrainedTokenizerFast"}
    ours = Tokenizer.load(write_folder(tmp_path, real, tokenizer_config=config))
    assert differences(ours, real) == []
    assert ours.eos_token_ids == (END_ID,)
    assert ours.encode("hi", add_special=True) == ours.encode("hi")


def test_gguf_equals_the_library(tmp_path: Path, real: tokenizers.Tokenizer) -> None:
    ours = gguf_twin(tmp_path / "m.gguf", real)
    assert differences(ours, real) == []
    assert END_ID in ours.eos_token_ids
    assert ours.encode("hi", add_special=True) == ours.encode("hi")


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2", "dbrx"])
def test_another_word_for_the_splits_is_another_tokenizer(
    tmp_path: Path, real: tokenizers.Tokenizer, pre: str
) -> None:
    """The control: digits one by one, GPT-2's words, and merges that are not passed over."""
    assert differences(gguf_twin(tmp_path / "m.gguf", real, pre), real)
