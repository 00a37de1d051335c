"""Tokenizers of real models, from GGUF twins and folders, against the same vocabularies in other hands.

Hugging Face's library reads the models' own tokenizer.json; SentencePiece and tiktoken are Mistral's own.
"""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from diptych.runtime.tokenizer.folder_files import read_vocabulary
from diptych.runtime.tokenizer.sentencepiece_model import parse
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.output.detokenizer import Detokenizer
from tests.diptych.runtime.tokenizer import gguf_twins, real_tokenizers
from tests.diptych.runtime.tokenizer.sample_texts import texts

BYTE_LEVEL = [
    ("deepseek_v3", "deepseek-v3"),
    ("gptoss", "gpt-4o"),
    ("gpt4o", "gpt-4o"),
    ("llama3", "llama-bpe"),
    ("qwen3", "qwen2"),
]
TEKKEN = ["tekken_240718.json", "tekken_240911.json"]


def _fetched(path: Path) -> Path:
    if not path.is_file():
        pytest.skip(f"{path} is not there: {real_tokenizers.HOW}")
    return path


def _library(path: Path) -> tokenizers.Tokenizer:
    real = tokenizers.Tokenizer.from_file(str(_fetched(path)))
    real.encode_special_tokens = True
    return real


def _check(
    ours: Tokenizer,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    compared: Sequence[str] | None = None,
) -> None:
    """Compare ids, the text of them, and that text streamed token by token."""
    for text in compared or texts():
        ids = encode(text)
        assert ours.encode(text) == ids, repr(text)
        shown = decode(ids)
        assert ours.decode(ids, skip_special=True) == shown, repr(text)
        streamed = Detokenizer(ours, skip_special=True)
        pieces = [streamed.push([one]) for one in ids]
        assert "".join(pieces) + streamed.flush() == shown, repr(text)
        assert "\ufffd" not in shown or "\ufffd" in text, repr(text)


def _check_library(
    ours: Tokenizer, real: tokenizers.Tokenizer, compared: Sequence[str] | None = None
) -> None:
    _check(
        ours,
        lambda text: real.encode(text, add_special_tokens=False).ids,
        lambda ids: real.decode(ids, skip_special_tokens=True),
        compared,
    )


def test_texts_are_at_least_two_hundred() -> None:
    assert len(set(texts())) >= 200


@pytest.mark.parametrize(("name", "pre"), BYTE_LEVEL)
def test_gguf_of_byte_level_bpe_equals_its_tokenizer_json(tmp_path: Path, name: str, pre: str) -> None:
    path = real_tokenizers.tokenizer_json(name)
    real = _library(path)
    spec = json.loads(path.read_text(encoding="utf-8"))
    _check_library(Tokenizer.load(gguf_twins.write_byte_level(tmp_path / "m.gguf", spec, pre)), real)


@pytest.mark.parametrize("name", ["llama2", "gemma3"])
def test_gguf_of_sentencepiece_equals_its_tokenizer_json(tmp_path: Path, name: str) -> None:
    spec = _sentencepiece_spec(name)
    real = tokenizers.Tokenizer.from_str(json.dumps(spec))
    real.encode_special_tokens = True
    _, added = gguf_twins.tokens_of(spec)
    pieces = gguf_twins.scored_pieces(spec)
    twin = gguf_twins.write_sentencepiece(tmp_path / "m.gguf", pieces, added, prefix=name == "llama2")
    # The converter spells Gemma's runs of spaces as such, so that a text with the mark itself finds none.
    compared = [text for text in texts() if name == "llama2" or gguf_twins.SPACE * 2 not in text]
    assert len(compared) >= 200
    _check_library(Tokenizer.load(twin), real, compared)


def _sentencepiece_spec(name: str) -> dict[str, Any]:
    if name == "llama2":
        _fetched(real_tokenizers.llama2_script())
        return real_tokenizers.llama2_spec()
    spec: dict[str, Any] = json.loads(
        _fetched(real_tokenizers.tokenizer_json(name)).read_text(encoding="utf-8")
    )
    return spec


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "gptoss"])
def test_folder_with_tokenizer_json_equals_it(tmp_path: Path, name: str) -> None:
    path = real_tokenizers.tokenizer_json(name)
    real = _library(path)
    _folder(tmp_path, real.get_vocab_size(), "tokenizer.json", path.read_bytes())
    _check_library(Tokenizer.load(tmp_path), real)


@pytest.mark.parametrize("name", TEKKEN)
def test_tekken_folder_equals_tiktoken(tmp_path: Path, name: str) -> None:
    path = _fetched(real_tokenizers.mistral_file(name))
    ours = Tokenizer.load(_folder(tmp_path, 131_072, "tekken.json", path.read_bytes()))
    encoding, special = _tekken_oracle(path)
    _check(
        ours,
        lambda text: [one + special for one in encoding.encode_ordinary(text)],
        lambda ids: encoding.decode([one - special for one in ids]),
    )
    assert ours.eos_token_ids == (2,)
    assert ours.encode("hi", add_special=True)[0] == 1


def test_gguf_of_tekken_equals_tiktoken(tmp_path: Path) -> None:
    path = _fetched(real_tokenizers.mistral_file(TEKKEN[-1]))
    folder = _folder(tmp_path, 131_072, "tekken.json", path.read_bytes())
    spec = json.loads(read_vocabulary(folder, {}).data)
    ours = Tokenizer.load(gguf_twins.write_byte_level(tmp_path / "m.gguf", spec, "tekken"))
    encoding, special = _tekken_oracle(path)
    _check(
        ours,
        lambda text: [one + special for one in encoding.encode_ordinary(text)],
        lambda ids: encoding.decode([one - special for one in ids]),
    )


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_sentencepiece_model_equals_sentencepiece(tmp_path: Path, name: str, form: str) -> None:
    path = _fetched(real_tokenizers.mistral_file(name))
    real_tokenizers.import_oracles()
    real = importlib.import_module("sentencepiece").SentencePieceProcessor(model_file=str(path))
    if form == "folder":
        _folder(tmp_path, real.vocab_size(), "tokenizer.model", path.read_bytes())
        ours = Tokenizer.load(tmp_path)
    else:
        pieces = list(parse(path.read_bytes()).pieces)
        rows = [(piece.text, piece.score, piece.kind) for piece in pieces]
        ours = Tokenizer.load(gguf_twins.write_sentencepiece(tmp_path / "m.gguf", rows, {}, prefix=True))
    _check(ours, real.encode, real.decode)


def _tekken_oracle(path: Path) -> tuple[Any, int]:
    """Return tiktoken with a tekken.json's ranks, and the first id of these."""
    real_tokenizers.import_oracles()
    content = json.loads(path.read_text(encoding="utf-8"))
    config = content["config"]
    special = config["default_num_special_tokens"]
    entries = content["vocab"][: config["default_vocab_size"] - special]
    encoding = importlib.import_module("tiktoken").Encoding(
        name="tekken",
        pat_str=config["pattern"],
        mergeable_ranks={base64.b64decode(one["token_bytes"]): one["rank"] for one in entries},
        special_tokens={},
    )
    return encoding, special


def _folder(folder: Path, vocab_size: int, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    config = {"vocab_size": vocab_size, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_another_pre_tokenizer_is_another_tokenizer(tmp_path: Path) -> None:
    """The control: the comparison must see a pattern that groups digits or letters otherwise."""
    path = real_tokenizers.tokenizer_json("deepseek_v3")
    real = _library(path)
    spec = json.loads(path.read_text(encoding="utf-8"))
    for other in ("qwen2", "deepseek-llm", "gpt-2"):
        ours = Tokenizer.load(gguf_twins.write_byte_level(tmp_path / f"{other}.gguf", spec, other))
        with pytest.raises(AssertionError):
            _check_library(ours, real)
