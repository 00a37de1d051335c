"""Folders without a tokenizer.json: tekken.json, and vocab.json with merges.txt."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from diptych.runtime.tokenizer.byte_level import read_bytes
from diptych.runtime.tokenizer.tokenizer import Tokenizer, UnusableTokenizer
from gateway.output.detokenizer import Detokenizer
from tests.diptych.runtime.tokenizer.sample_texts import texts
from tests.diptych.runtime.tokenizer.small_models import byte_level

CONFIG = {"vocab_size": 900, "max_position_embeddings": 64}
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NUM_SPECIAL = 24


def _write(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ({"config_json": CONFIG} | files).items():
        path = folder / ".".join(name.rsplit("_", 1))
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def _spec() -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(byte_level().to_str())
    return spec


def _tekken(**changes: Any) -> dict[str, Any]:
    added = {entry["content"] for entry in _spec()["added_tokens"]}
    ranked = sorted(_spec()["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [read_bytes(text) for text, _ in ranked if text not in added]
    single = sorted(token for token in tokens if len(token) == 1)
    ranks = [*single, *(token for token in tokens if len(token) > 1)]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(ranks)
    ]
    config = {
        "pattern": PATTERN,
        "default_vocab_size": len(ranks) + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
    }
    return {"config": config | changes.pop("config", {}), "vocab": vocab} | changes


def _tiktoken(content: dict[str, Any], text: str) -> list[int]:
    """Return the ids that tiktoken's algorithm gives: the pair of the lowest rank is joined first."""
    import regex

    ranks = {base64.b64decode(one["token_bytes"]): one["rank"] for one in content["vocab"]}
    ids = []
    for part in regex.findall(PATTERN, text):
        data = part.encode()
        symbols = [data] if data in ranks else [bytes([byte]) for byte in data]
        while True:
            joined = [(ranks.get(symbols[at] + symbols[at + 1]), at) for at in range(len(symbols) - 1)]
            known = [(rank, at) for rank, at in joined if rank is not None]
            if not known:
                break
            _, at = min(known)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        ids += [ranks[symbol] + NUM_SPECIAL for symbol in symbols]
    return ids


def test_tekken_equals_tiktokens_algorithm(tmp_path: Path) -> None:
    content = _tekken()
    ours = Tokenizer.load(_write(tmp_path, tekken_json=content))
    for text in texts():
        ids = ours.encode(text)
        assert ids == _tiktoken(content, text), repr(text)
        assert ours.decode(ids, skip_special=True) == text
        streamed = Detokenizer(ours, skip_special=True)
        assert "".join(streamed.push([one]) for one in ids) + streamed.flush() == text
    assert ours.encode("the", add_special=True) == [1, *ours.encode("the")]
    assert ours.eos_token_ids == (2,)
    assert ours.template_names == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ours.token_text(3) == "[INST]"
    assert ours.token_text(NUM_SPECIAL - 1) == f"<SPECIAL_{NUM_SPECIAL - 1}>"


def test_tekken_names_its_control_tokens(tmp_path: Path) -> None:
    special = [{"rank": 1, "token_str": "<bos>"}, {"rank": 0, "token_str": "<pad>"}]
    ours = Tokenizer.load(_write(tmp_path, tekken_json=_tekken(special_tokens=special)))
    assert [ours.token_text(at) for at in range(3)] == ["<pad>", "<bos>", "<SPECIAL_2>"]
    assert ours.is_special(0)
    assert not any(map(ours.is_special, ours.encode("<pad><bos>")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "KeyError"),
        (_tekken(config={"default_vocab_size": 10_000}), "or fewer than its config says"),
        (_tekken(special_tokens=[{"rank": 5, "token_str": "x"}]), "IndexError"),
        (_tekken(special_tokens=[{"rank": 0, "token_str": "<SPECIAL_1>"}]), "do not fit"),
        (_tekken(vocab=[{"token_bytes": "é"}] * 700), "damaged"),
    ],
)
def test_tekken_files_that_this_build_cannot_serve(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UnusableTokenizer, match=message):
        Tokenizer.load(_write(tmp_path, tekken_json=content))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    spec = _spec()
    own = {entry["content"]: entry["id"] for entry in spec["added_tokens"]}
    vocab = {text: at for text, at in spec["model"]["vocab"].items() if text not in own}
    merges = "#version: 0.2\n" + "\n".join(" ".join(merge) for merge in spec["model"]["merges"]) + "\n"
    made = {}
    for kind, theirs in (("GPT2Tokenizer", GPT2Tokenizer), ("Qwen2TokenizerFast", Qwen2Tokenizer)):
        folder = tmp_path_factory.mktemp("folder")
        decoder = {str(at): {"content": text, "special": text != "<think>"} for text, at in own.items()}
        _write(
            folder,
            vocab_json=vocab,
            merges_txt=merges,
            tokenizer_config_json={
                "tokenizer_class": kind,
                "added_tokens_decoder": decoder,
                "eos_token": "</s>",
                "unk_token": "</s>",
                "bos_token": "<s>",
                "pad_token": "</s>",
            },
        )
        made[kind] = Tokenizer.load(folder), theirs.from_pretrained(folder)
    return made


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2TokenizerFast"])
@given(text=st.text(max_size=30) | st.sampled_from(texts()))
def test_vocab_and_merges_equal_transformers(
    pairs: dict[str, tuple[Tokenizer, Any]], kind: str, text: str
) -> None:
    ours, theirs = pairs[kind]
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_added_tokens_json_is_read(tmp_path: Path) -> None:
    spec = _spec()
    own = {entry["content"]: entry["id"] for entry in spec["added_tokens"]}
    vocab = {text: at for text, at in spec["model"]["vocab"].items() if text not in own}
    merges = "\n".join(" ".join(merge) for merge in spec["model"]["merges"])
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}
    files: dict[str, Any] = {"vocab_json": vocab, "merges_txt": merges, "tokenizer_config_json": config}
    ours = Tokenizer.load(_write(tmp_path, added_tokens_json=own, **files))
    assert ours.id_of("<think>") == own["<think>"]
    assert ours.is_special(own["</s>"])
    assert not ours.is_special(own["<think>"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json, nor tekken.json"),
        ({"vocab_json": {"a": 0}}, "tokenizer_class is 'None'; vocab.json is read for GPT2Tokenizer and"),
        (
            {"vocab_json": {"a": 0}, "tokenizer_config_json": {"tokenizer_class": "GPT2Tokenizer"}},
            "no merges",
        ),
        (
            {
                "vocab_json": {"a": 0},
                "merges_txt": "x y",
                "tokenizer_config_json": {"tokenizer_class": "GPT2Tokenizer"},
            },
            "merges.txt does not fit",
        ),
    ],
)
def test_folders_that_this_build_cannot_serve(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableTokenizer, match=message):
        Tokenizer.load(_write(tmp_path, **files))
