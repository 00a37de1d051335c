"""Incremental detokenizing equals the full decode, for every id sequence and every cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.model.served_model import ServedModel
from gateway.output.detokenizer import Detokenizer, text_after
from tests.diptych.runtime.tokenizer.small_models import (
    byte_level,
    sentencepiece_like,
    spellable_text,
    write_folder,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return tokenizers of so few tokens that random ids often cut characters and make invalid UTF-8."""
    root: Path = tmp_path_factory.mktemp("models")
    return {
        "byte_level": Tokenizer.load(write_folder(root / "byte_level", byte_level(vocab_size=300))),
        "byte_fallback": Tokenizer.load(write_folder(root / "byte_fallback", sentencepiece_like())),
    }


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(data=st.data(), skip_special=st.booleans())
def test_detokenizer_pushes_add_up_to_decode(
    small: dict[str, Tokenizer], kind: str, data: st.DataObject, skip_special: bool
) -> None:
    tokenizer = small[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    detokenizer = Detokenizer(tokenizer, skip_special)
    pieces = [
        detokenizer.push(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)
    ]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(data=st.data())
def test_prompt_and_output_add_up_to_one_text(
    small: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Wherever the one ends: a character that is split between them is the output's, and so is a space."""
    tokenizer = small[kind]
    plain = st.integers(0, tokenizer.vocab_size - 1).filter(lambda one: not tokenizer.is_special(one))
    ids = data.draw(st.lists(plain, max_size=12))
    cut = data.draw(st.integers(0, len(ids)))
    text = text_after(tokenizer, ids[:cut], prompt_shown=True)
    detokenizer = Detokenizer(tokenizer, skip_special=False, text=text)
    shown = detokenizer.push(ids[cut:]) + detokenizer.flush()
    assert Detokenizer(tokenizer, skip_special=False).push(ids[:cut]) + shown == tokenizer.decode(ids, False)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (("the quick",), " brown fox"),
        (("<s>", "the quick"), " brown fox"),
        ((), "brown fox"),
        (("<s>",), "brown fox"),
        (("the quick", "<|im_end|>"), "brown fox"),
        (("<think>",), " brown fox"),  # no control token: its text is the prompt's
        (("<padding>",), "brown fox"),  # stands for nothing
        (("the quick", "<padding>"), " brown fox"),
        (("<s>", "<padding>"), "brown fox"),
    ],
)
@pytest.mark.parametrize("prompt_shown", [False, True])
def test_first_space_is_omitted_at_the_beginning_of_a_text(
    small: dict[str, Tokenizer], prompt: tuple[str, ...], shown: str, prompt_shown: bool
) -> None:
    tokenizer = small["byte_fallback"]
    ids: list[int] = []
    for part in prompt:
        if part == "<padding>":
            ids.append(tokenizer.vocab_size - 1)
        else:
            known = tokenizer.id_of(part)
            ids += tokenizer.encode(part) if known is None else [known]
    text = text_after(tokenizer, ids, prompt_shown=prompt_shown)
    detokenizer = Detokenizer(tokenizer, skip_special=True, text=text)
    assert detokenizer.push(tokenizer.encode("brown fox")) + detokenizer.flush() == shown


@pytest.mark.parametrize(
    ("prompt", "output", "shown"),
    [
        (b"\xf0\x9f", b"\x98\x80!", "😀!"),
        (b"\xf0\x9f\x98", b"", ""),
        (b"\xe6", b"[]", "[]"),
        (b"\xe6", b"\xe6\xbc\xa2", "漢"),
        (b"\xe6", b"\xe6A", "\ufffdA"),  # its own
        (b"\xe5\xad\x97", b"A", "A"),
        (b"\xf0\x9f\x98\x80\xc3", b"\xa9", "é"),
        (b"\x98", b"\x80", "\ufffd"),  # nothing that could be gone on with
        (b"", b"A", "A"),
    ],
)
def test_output_completes_the_last_character_of_the_prompt(
    small: dict[str, Tokenizer], prompt: bytes, output: bytes, shown: str
) -> None:
    tokenizer = small["byte_level"]
    text = text_after(tokenizer, _bytes_to_ids(tokenizer, prompt))
    detokenizer = Detokenizer(tokenizer, skip_special=True, text=text)
    assert detokenizer.push(_bytes_to_ids(tokenizer, output)) + detokenizer.flush() == shown


@given(text=spellable_text())
def test_detokenizer_returns_real_text_without_replacement_characters(
    bundled: ServedModel, text: str
) -> None:
    tokenizer = bundled.tokenizer
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    shown = ""
    for token_id in tokenizer.encode(text):
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.flush() == ""


def test_emoji_of_three_tokens_is_returned_with_the_last_one(bundled: ServedModel) -> None:
    tokenizer = bundled.tokenizer
    ids = tokenizer.encode("🧑")
    assert len(ids) == 3
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "🧑"]


def _bytes_to_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return one id per byte: every byte is a token of a byte-level vocabulary."""
    single = {tokenizer.piece(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [single[bytes([byte])] for byte in data]


@pytest.mark.parametrize(
    ("data", "pushed", "flushed"),
    [
        (b"\xf0\x9f\x98", ["", "", ""], "\ufffd"),  # cut off: certain only at the end
        (b"\xf0\x9f\x98A", ["", "", "", "\ufffdA"], ""),  # certain as soon as the next byte is there
        (b"\x80A", ["\ufffd", "A"], ""),  # cannot begin a character: certain at once
        (b"\xe0\x80", ["", "\ufffd\ufffd"], ""),  # overlong
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd"], ""),  # a surrogate: one byte later than it could
        (b"\xc3\xc3\xa9", ["", "\ufffd", "é"], ""),
    ],
)
def test_replacement_character_is_returned_only_when_certain(
    small: dict[str, Tokenizer], data: bytes, pushed: list[str], flushed: str
) -> None:
    tokenizer = small["byte_level"]
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    assert [detokenizer.push([token_id]) for token_id in _bytes_to_ids(tokenizer, data)] == pushed
    assert detokenizer.flush() == flushed


def test_special_tokens_are_skipped_or_shown(bundled: ServedModel) -> None:
    ids = [*bundled.tokenizer.encode("Hi"), 2]
    assert Detokenizer(bundled.tokenizer, skip_special=True).push(ids) == "Hi"
    assert Detokenizer(bundled.tokenizer, skip_special=False).push(ids) == "Hi<|im_end|>"


def test_flush_resets_the_detokenizer(small: dict[str, Tokenizer]) -> None:
    tokenizer = small["byte_fallback"]
    ids = tokenizer.encode("the dog")
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    for _ in range(2):
        assert detokenizer.push(ids) + detokenizer.flush() == "the dog"
