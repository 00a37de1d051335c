"""End tokens: the union of all that a model's files name as an end, alike of folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diptych.runtime.grammar.vocabulary import vocabulary
from diptych.runtime.tokenizer.end_tokens import declared_ids, turn_end_ids, union
from diptych.runtime.tokenizer.source import AddedToken
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from tests.diptych.runtime.tokenizer.small_models import CHATML, byte_level, write_folder, write_gguf

BASE, END = byte_level().token_to_id("</s>"), byte_level().token_to_id("<|im_end|>")
TURN_END = "<|im_end|>"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": TURN_END, "added_tokens_decoder": {}}},
        {"tokenizer_config": {"eos_token": {"content": TURN_END}}},
        {"tokenizer_config": {"added_tokens_decoder": {}}, "special_tokens_map": {"eos_token": TURN_END}},
        {"tokenizer_config": {"eos_token": "</s>"}, "special_tokens_map": {"eos_token": TURN_END}},
        {"tokenizer_config": {"chat_template": CHATML}},
        {"tokenizer_config": {"eos_token": "</s>"}, "chat_template": CHATML},
    ],
)
def test_folder_ends_where_the_base_config_and_where_the_tokenizer_say(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    config = {"vocab_size": 700, "max_position_embeddings": 64, "eos_token_id": BASE}
    folder = write_folder(
        tmp_path, byte_level(), config=config, generation_config={"eos_token_id": BASE}, **files
    )
    assert Tokenizer.load(folder).eos_token_ids == (BASE, END)


def test_config_ends_an_output_beside_generation_config(tmp_path: Path) -> None:
    config = {"vocab_size": 700, "max_position_embeddings": 64, "eos_token_id": [7, BASE]}
    folder = write_folder(tmp_path, byte_level(), config=config, generation_config={"eos_token_id": BASE})
    assert Tokenizer.load(folder).eos_token_ids == (BASE, 7)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_gguf_ends_at_its_turn_end_though_it_declares_the_base_end(tmp_path: Path, pre: str) -> None:
    templates = [{"name": "default", "template": CHATML}]
    path = write_gguf(tmp_path / "m.gguf", byte_level(), pre, eos_token_id=BASE, templates=templates)
    assert Tokenizer.load(path).eos_token_ids == (BASE, END)


def test_gguf_without_a_template_ends_by_the_texts_of_its_control_tokens(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level(), "gpt-2", eos_token_id=BASE)
    assert Tokenizer.load(path).eos_token_ids == (BASE, END)


def test_grammar_may_end_at_every_end(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path, byte_level(), generation_config={"eos_token_id": BASE}, chat_template=CHATML
    )
    assert vocabulary(Tokenizer.load(folder)).eos_token in (BASE, END)


def test_turn_end_counts_only_as_a_control_token_that_a_template_writes() -> None:
    tokens = [AddedToken(1, TURN_END, control=True), AddedToken(2, "<|eot_id|>", control=False)]
    assert turn_end_ids(tokens, ["{{ '<|im_end|>' }}{{ '<|eot_id|>' }}"]) == [1]
    assert turn_end_ids(tokens, ["{{ eos_token }}"]) == []
    assert turn_end_ids(tokens, []) == [1]


def test_end_of_a_harmony_message_is_no_end_of_an_answer() -> None:
    tokens = [AddedToken(1, "<|end|>", control=True), AddedToken(2, "<|return|>", control=True)]
    assert turn_end_ids(tokens, ["<|end|><|return|>"]) == [2]
    assert turn_end_ids(tokens[:1], ["<|end|>"]) == [1]


def test_declared_ids_are_numbers_alone() -> None:
    assert declared_ids([3, True, "5", None]) == [3]
    assert declared_ids(None) == []
    assert union([3, None, -1, 3, 9, 8], 9) == (3, 8)
