"""Tokenizers from Hugging Face folders against the same tokenizer.json in the hands of its own library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders
from transformers import PreTrainedTokenizerFast

from diptych.runtime.tokenizer.tokenizer import Tokenizer, UnusableTokenizer
from gateway.model.chat_template import ChatTemplate, Message
from tests.diptych.runtime.tokenizer.small_models import CHATML, byte_level, sentencepiece_like, write_folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    root = tmp_path_factory.mktemp("folders")
    made = {}
    for kind, theirs in (("byte_level", byte_level()), ("byte_fallback", sentencepiece_like())):
        made[kind] = Tokenizer.load(write_folder(root / kind, theirs)), theirs
    return made


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=30))
def test_agrees_with_the_library(pair: dict[str, tuple[Tokenizer, Any]], kind: str, text: str) -> None:
    ours, theirs = pair[kind]
    expected = theirs.encode(text).ids
    assert ours.encode(text, add_special=True) == expected
    assert ours.decode(expected, skip_special=True) == theirs.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    "steps",
    [
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()],
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()],
        [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()],
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        # LLM-jp's
        [
            decoders.ByteFallback(),
            decoders.Replace(Regex("▁"), " "),
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<!\n)^ "), ""),
        ],
    ],
)
def test_the_first_space_goes_where_the_decoder_leaves_it_out(tmp_path: Path, steps: list[Any]) -> None:
    theirs = sentencepiece_like()
    theirs.decoder = decoders.Sequence(steps)
    ours = Tokenizer.load(write_folder(tmp_path, theirs))
    for text in ("the quick fox", " jumps", "é😀\n lazy"):
        ids = ours.encode(text, add_special=True)
        assert ours.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("opening", ["", "<s>", "note: "])
def test_parts_encode_as_the_rendered_text_does(
    pair: dict[str, tuple[Tokenizer, Any]], kind: str, opening: str
) -> None:
    """The library reads the rendered text in one go; ours goes part by part and must not add a space."""
    ours, theirs = pair[kind]
    template = ChatTemplate(opening + CHATML, ours.control_tokens, {})
    messages = [Message("user", "the quick fox"), Message("assistant", "jumps"), Message("user", " é😀\n")]
    parts = template.render(messages, add_generation_prompt=True)
    text = "".join(part if isinstance(part, str) else part.text for part in parts)
    assert ours.encode_parts(parts) == theirs.encode(text, add_special_tokens=False).ids


def test_tokens_that_take_in_white_space(tmp_path: Path) -> None:
    theirs = byte_level()
    theirs.add_special_tokens(
        [AddedToken("<|both|>", special=True, normalized=False, lstrip=True, rstrip=True)]
    )
    ours = Tokenizer.load(write_folder(tmp_path, theirs))
    text = "the  <|both|> \n fox<|both|>."
    template = ChatTemplate(text, ours.control_tokens, {})
    parts = template.render([], add_generation_prompt=False)
    assert ours.encode_parts(parts) == theirs.encode(text, add_special_tokens=False).ids


def test_the_small_files_are_read(tmp_path: Path) -> None:
    theirs = byte_level()
    ours = Tokenizer.load(
        write_folder(
            tmp_path,
            theirs,
            generation_config={"eos_token_id": [3, 5], "temperature": 0.6, "do_sample": True},
            tokenizer_config={
                "bos_token": {"content": "<s>"},
                "eos_token": "</s>",
                "chat_template": [
                    {"name": "tool_use", "template": "t"},
                    {"name": "default", "template": "d"},
                ],
            },
        )
    )
    assert ours.eos_token_ids == (3, 5, theirs.token_to_id("</s>"))
    assert ours.generation_defaults["temperature"] == 0.6
    assert ours.template_names == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (ours.chat_template, ours.tool_template) == ("d", "t")
    assert ours.max_context == 512
    assert ours.vocab_size == theirs.get_vocab_size() + 8  # rows that only pad the embedding
    assert ours.token_text(ours.vocab_size - 1) == ""
    assert ours.decode([ours.vocab_size - 1], skip_special=False) == ""


@pytest.mark.parametrize("decoder", [{}, {"added_tokens_decoder": {}}])
def test_the_names_of_special_tokens_are_those_of_transformers(
    tmp_path: Path, decoder: dict[str, object]
) -> None:
    folder = write_folder(
        tmp_path,
        byte_level(),
        tokenizer_config={
            "sep_token": "<|im_end|>",
            "add_bos_token": True,
            "image_token": "<think>",
            **decoder,
        },
        special_tokens_map={"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}},
    )
    ours, theirs = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.template_names == theirs.special_tokens_map
    assert ours.eos_token_ids == (ours.id_of("</s>"),), "both files may name an end"
    assert decoder or ours.eos_token_ids == (theirs.eos_token_id,)


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path, byte_level(), tokenizer_config={"chat_template": "old"}, chat_template="new"
    )
    assert Tokenizer.load(folder).chat_template == "new"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Tokenizer.load(folder).tool_template == "tools"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"vocab_size": 700, "max_position_embeddings": 64, "eos_token_id": 7}}, (7,)),
        ({"tokenizer_config": {"eos_token": "</s>"}}, None),  # by its text
        ({"tokenizer_config": {"eos_token": "unheard of"}}, ()),
        ({"generation_config": {"eos_token_id": [5, -1, 100_000]}}, (5,)),
        ({"generation_config": {"eos_token_id": -1}}, ()),
        ({}, ()),
    ],
)
def test_where_end_of_sequence_comes_from(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...] | None
) -> None:
    theirs = byte_level()
    ours = Tokenizer.load(write_folder(tmp_path, theirs, **files))
    assert ours.eos_token_ids == ((theirs.token_to_id("</s>"),) if expected is None else expected)


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    theirs = byte_level()
    theirs.enable_truncation(max_length=3)
    theirs.enable_padding(length=50)
    ours = Tokenizer.load(write_folder(tmp_path, theirs))
    assert ours.decode(ours.encode("the quick brown fox"), skip_special=False) == "the quick brown fox"


def test_folders_that_this_build_cannot_serve(tmp_path: Path) -> None:
    with pytest.raises(UnusableTokenizer, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnusableTokenizer, match="not JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(UnusableTokenizer, match="no object"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": {"type": "ByteLevel"}, "model": 1}))
    with pytest.raises(UnusableTokenizer, match=r"tokenizer\.json:"):
        Tokenizer.load(tmp_path)
    wordpiece = byte_level()
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(UnusableTokenizer, match="WordPiece"):
        Tokenizer.load(write_folder(tmp_path / "wordpiece", wordpiece))
    with pytest.raises(UnusableTokenizer, match="vocab_size"):
        Tokenizer.load(write_folder(tmp_path / "bare", byte_level(), config={"max_position_embeddings": 1}))
