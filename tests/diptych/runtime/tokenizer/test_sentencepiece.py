"""SentencePiece vocabularies, from GGUF files and tokenizer.model, against SentencePiece's own algorithm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.runtime.tokenizer.sentencepiece import (
    Piece,
    PieceKind,
    added_tokens,
    derive_merges,
    plain_pieces,
)
from diptych.runtime.tokenizer.sentencepiece_model import parse
from diptych.runtime.tokenizer.tokenizer import Tokenizer, UnusableTokenizer
from gateway.output.detokenizer import Detokenizer
from tests.diptych.runtime.tokenizer.gguf_twins import write_sentencepiece
from tests.diptych.runtime.tokenizer.pieces import model_file, sentencepiece_encode, small_pieces
from tests.diptych.runtime.tokenizer.sample_texts import texts

LLAMA, GEMMA = small_pieces(), small_pieces(gemma=True)
WORDS = st.sampled_from(
    ["the ", "quick", "  ", "    ", "\n\n", "123", "aaab", "<b>", "你好", "😀", "▁", "abab", " lazy.", "<s>"]
)


def _gguf(path: Path, pieces: list[Piece], prefix: bool) -> Tokenizer:
    rows = [(piece.text, piece.score, piece.kind) for piece in plain_pieces(pieces)]
    return Tokenizer.load(write_sentencepiece(path / "m.gguf", rows, {}, prefix=prefix))


def _folder(folder: Path, data: bytes, **config: Any) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 900, "max_position_embeddings": 64}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {}
    for name, pieces, prefix in (("llama", LLAMA, True), ("gemma", GEMMA, False)):
        made[name, "gguf"] = _gguf(tmp_path_factory.mktemp("gguf"), pieces, prefix)
        data = model_file(pieces, prefix=prefix)
        made[name, "folder"] = _folder(tmp_path_factory.mktemp("folder"), data)
    return {" ".join(key): value for key, value in made.items()}


@pytest.mark.parametrize("form", ["gguf", "folder"])
@pytest.mark.parametrize(("name", "pieces"), [("llama", LLAMA), ("gemma", GEMMA)])
def test_vocabulary_equals_sentencepiece_on_the_sample_texts(
    made: dict[str, Tokenizer], name: str, pieces: list[Piece], form: str
) -> None:
    _check(made[f"{name} {form}"], pieces, name == "llama", list(filter(_is_compared(name), texts())))


@pytest.mark.parametrize("form", ["gguf", "folder"])
@pytest.mark.parametrize(("name", "pieces"), [("llama", LLAMA), ("gemma", GEMMA)])
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(WORDS | st.text(max_size=3), max_size=10).map("".join))
def test_vocabulary_equals_sentencepiece_on_any_text(
    made: dict[str, Tokenizer], name: str, pieces: list[Piece], form: str, text: str
) -> None:
    _check(made[f"{name} {form}"], pieces, name == "llama", list(filter(_is_compared(name), [text])))


def _is_compared(name: str) -> Callable[[str], bool]:
    """Return what is compared: no user-defined run of spaces is found where a text has the mark itself."""
    return lambda text: name == "llama" or "▁" not in text


def _check(ours: Tokenizer, pieces: list[Piece], prefix: bool, compared: list[str]) -> None:
    for text in compared:
        ids = ours.encode(text)
        assert ids == sentencepiece_encode(pieces, text, prefix=prefix), repr(text)
        shown = text.replace("▁", " ")  # as SentencePiece does
        assert ours.decode(ids, skip_special=False) == shown, repr(text)
        streamed = Detokenizer(ours, skip_special=True)
        assert "".join(streamed.push([one]) for one in ids) + streamed.flush() == shown, repr(text)


def test_order_by_id_instead_of_score_is_another_tokenizer(tmp_path: Path) -> None:
    """The control: with the scores turned round some texts must differ."""
    turned = [one._replace(score=-one.score - 1000) if one.kind == PieceKind.NORMAL else one for one in LLAMA]
    ours = _gguf(tmp_path, turned, prefix=True)
    differ = [one for one in texts() if ours.encode(one) != sentencepiece_encode(LLAMA, one, prefix=True)]
    assert differ


@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_runs_of_spaces_are_one_token_that_decodes_to_spaces(made: dict[str, Tokenizer], form: str) -> None:
    gemma = made[f"gemma {form}"]
    ids = gemma.encode("a" + " " * 4 + "b")
    assert len(ids) == 3
    assert gemma.decode(ids[1:2], skip_special=True) == " " * 4


@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_text_that_spells_a_control_token_or_a_byte_stays_text(made: dict[str, Tokenizer], form: str) -> None:
    llama = made[f"llama {form}"]
    for text in ("<s>", "</s>", "<unk>", "<0x0A>", "<end_of_turn>"):
        ids = llama.encode(text)
        assert not any(map(llama.is_special, ids))
        assert len(ids) > 1
        assert llama.decode(ids, skip_special=True) == text


@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_beginning_and_end_are_those_of_the_file(made: dict[str, Tokenizer], form: str) -> None:
    llama = made[f"llama {form}"]
    assert llama.encode("the", add_special=True) == [1, *llama.encode("the")]
    assert llama.eos_token_ids[0] == 2
    assert llama.template_names == {"bos_token": "<s>", "eos_token": "</s>"}


def test_space_comes_before_the_first_text_alone_without_legacy(tmp_path: Path) -> None:
    ours = _folder(tmp_path, model_file(LLAMA), legacy=False)
    parts = ours.control_tokens.split("the<s>the")
    the, bare = ours.encode("the"), ours.encode_parts(parts)
    assert bare[: len(the)] == the
    assert bare[-len(the) :] != the


def test_pieces_may_be_added_beside_the_model(tmp_path: Path) -> None:
    """List user-defined pieces again, and new ones behind them, as Gemma's tokenizer_config.json does."""
    run = next(at for at, piece in enumerate(GEMMA) if piece.text == "▁▁▁")
    listed = {str(run): {"content": "▁▁▁"}, str(len(GEMMA)): {"content": "<img>", "special": True}}
    ours = _folder(tmp_path, model_file(GEMMA, prefix=False), added_tokens_decoder=listed)
    assert ours.encode("a   b")[1] == run
    assert ours.is_special(len(GEMMA))
    moved = {str(run + 1): {"content": "▁▁▁"}}
    with pytest.raises(UnusableTokenizer, match="has the id"):
        _folder(tmp_path, model_file(GEMMA, prefix=False), added_tokens_decoder=moved)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model_file(LLAMA, model_type=1), "type unigram"),
        (model_file(LLAMA, joins_spaces=True), "joins runs of spaces"),
        (model_file(LLAMA, charsmap=b"x"), "rewrites characters"),
        (model_file([]), "no vocabulary"),
        (model_file(LLAMA)[:-1], "cut short"),
        (b"\x0a\xff\xff", "cut short"),
        (b"\x0b", "wire type 3"),
        (b"\xff" * 12, "cut short"),
        (model_file(LLAMA[:2] + LLAMA[:2]), "twice"),
        (model_file(LLAMA[1:200]), "neither all bytes"),
    ],
)
def test_models_that_this_build_cannot_serve(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UnusableTokenizer, match=message):
        _folder(tmp_path, data)


@given(data=st.binary(max_size=60))
def test_damaged_models_are_refused_in_words(data: bytes) -> None:
    try:
        parse(data)
    except UnusableTokenizer:
        return


def test_merges_never_make_a_control_token() -> None:
    assert not {left + right for left, right in derive_merges(LLAMA)} & {
        token.text for token in added_tokens(LLAMA)
    }
