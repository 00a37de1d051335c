"""Tokenizers rebuilt from GGUF files of each pre-tokenizer, and files that this build cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from diptych.runtime.tokenizer.tokenizer import Tokenizer, UnusableTokenizer
from tests.diptych.runtime.tokenizer.small_models import byte_level, composed, write_gguf

# Copied from the models' own tokenizer.json files.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )


def _llama3() -> tokenizers.Tokenizer:
    tokenizer = byte_level(_split(LLAMA3))
    tokenizer.model.ignore_merges = True
    return tokenizer


FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt-2": byte_level,
    "smollm": lambda: byte_level(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "llama-bpe": _llama3,
    "qwen2": lambda: composed(byte_level(_split(QWEN2))),
}
WORDS = st.sampled_from(
    [
        "the ",
        "quick",
        "  ",
        "\n\n",
        "12345",
        "don't",
        "WE'LL",
        "é",
        "e\u0301",
        "你好",
        "😀",
        "<think>",
        "\t",
        "½",
    ]
)


@pytest.mark.parametrize("pre", FAMILIES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(WORDS | st.text(max_size=4), max_size=12).map("".join))
def test_each_family_is_rebuilt_exactly(
    pre: str, text: str, families: dict[str, tuple[Tokenizer, Any]]
) -> None:
    ours, theirs = families[pre]
    expected = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == expected
    assert ours.decode(expected, skip_special=True) == theirs.decode(expected, skip_special_tokens=True)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    root = tmp_path_factory.mktemp("gguf")
    made = {}
    for pre, make in FAMILIES.items():
        theirs = make()
        theirs.encode_special_tokens = True
        made[pre] = Tokenizer.load(write_gguf(root / f"{pre}.gguf", theirs, pre)), theirs
    return made


@pytest.mark.parametrize(
    ("pre", "flag", "leads"),
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),  # as llama.cpp: files made before the flag existed
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_bos_leads_a_text_prompt_if_the_model_wants_it(
    tmp_path: Path, pre: str, flag: dict[str, object], leads: bool
) -> None:
    trained = byte_level()
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", trained, pre, **flag))
    bos = [trained.token_to_id("<s>")] if leads else []
    assert tokenizer.encode("the fox", add_special=True) == bos + tokenizer.encode("the fox")


def test_every_end_of_turn_id_stops(tmp_path: Path) -> None:
    trained = byte_level()
    end = trained.token_to_id("<|im_end|>")
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", trained, "gpt-2", eot_token_id=end))
    assert tokenizer.eos_token_ids == (trained.token_to_id("</s>"), end)
    assert tokenizer.max_context == 256


def test_user_defined_tokens_are_tokens_and_control_tokens_are_not(tmp_path: Path) -> None:
    trained = byte_level()
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", trained, "gpt-2"))
    ids = tokenizer.encode("a<think>b</s>")
    assert trained.token_to_id("<think>") in ids
    assert trained.token_to_id("</s>") not in ids
    assert not tokenizer.is_special(trained.token_to_id("<think>"))


def test_the_digest_is_of_what_decides_the_ids(tmp_path: Path) -> None:
    trained = byte_level()
    digests = [
        Tokenizer.load(write_gguf(tmp_path / f"{index}.gguf", trained, pre, **extra)).digest
        for index, (pre, extra) in enumerate(
            [("gpt-2", {}), ("qwen2", {}), ("gpt-2", {"add_bos_token": True})]
        )
    ]
    assert len(set(digests)) == 3
    again = Tokenizer.load(write_gguf(tmp_path / "again.gguf", trained, "gpt-2", padding_token_id=0))
    assert again.digest == digests[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "model is 't5'; this build has gpt2"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [1.0]}, "tokens but 1 scores"),
        ({"pre": "kimi-k2"}, "pre is 'kimi-k2'; this build has a.x-4.0, "),
        ({"pre": "default"}, "pre is 'default'"),
        ({"without": "pre"}, "pre is None"),
        ({"without": "merges"}, "merges is missing"),
        ({"without": "tokens"}, "tokens is missing"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1], "bos_token_id": 0, "eos_token_id": 1}, "twice"),
        ({"token_type": [1, 1]}, "token types"),
        ({"merges": ["nospace"]}, "not a pair"),
        ({"merges": ["a b c"]}, "not a pair"),
        ({"merges": ["zzzz qqqq"]}, "do not fit"),
        ({"eos_token_id": 10**6}, "eos_token_id is outside"),
        ({"eos_token_id": "two"}, "should be int, is str"),
        ({"add_bos_token": 1}, "should be bool, is int"),
    ],
)
def test_files_that_this_build_cannot_serve(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arguments = {"pre": "gpt-2"} | changes
    with pytest.raises(UnusableTokenizer, match=message):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level(), **arguments))


@pytest.mark.parametrize(
    ("pre", "ends"),
    [
        ("qwen2", ["<|im_end|>", "<|endoftext|>"]),
        ("llama-bpe", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    ],
)
def test_the_other_ends_of_a_family_stop_though_the_file_names_one(
    tmp_path: Path, pre: str, ends: list[str]
) -> None:
    trained = byte_level()
    trained.add_special_tokens(ends)
    first, *others = (trained.token_to_id(text) for text in ends)
    kinds = [1] * trained.get_vocab_size()
    for token_id in (first, *others):
        kinds[token_id] = 3
    path = write_gguf(tmp_path / "m.gguf", trained, pre, eos_token_id=first, token_type=kinds)
    assert Tokenizer.load(path).eos_token_ids == (first, *others)
    kinds[others[0]] = 1  # text that looks like one
    path = write_gguf(tmp_path / "m.gguf", trained, pre, eos_token_id=first, token_type=kinds)
    assert Tokenizer.load(path).eos_token_ids == (first, *others[1:])


def test_templates_by_their_names(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level(), "gpt-2", templates=templates))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("d", "t")
