"""GGUF files with the vocabulary of a real tokenizer, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
_OF_RUNS = -1e9
"""Score of runs of spaces in Llama's and Mistral's models."""


def looks_special(text: str) -> bool:
    """Return whether the converter takes a token for a control token, whatever its flag says."""
    if text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]"):
        return True
    enclosed = (("<|", "|>"), ("<｜", "｜>"))
    return any(text.startswith(a) and text.endswith(b) for a, b in enclosed) or text.startswith("<unused")


def tokens_of(spec: dict[str, Any]) -> tuple[list[str], dict[int, dict[str, Any]]]:
    """Return the tokens of a tokenizer.json by id, and the entries of its added ones."""
    added = {entry["id"]: entry for entry in spec["added_tokens"]}
    ids = {token_id: text for text, token_id in spec["model"]["vocab"].items()}
    ids |= {token_id: entry["content"] for token_id, entry in added.items()}
    return [ids.get(token_id, f"[PAD{token_id}]") for token_id in range(max(ids) + 1)], added


def write_byte_level(path: Path, spec: dict[str, Any], pre: str) -> Path:
    """Write the twin of a byte-level tokenizer.json."""
    writer = _writer(path)
    add_byte_level(writer, spec, pre)
    return _written(writer, path)


def add_byte_level(writer: gguf.GGUFWriter, spec: dict[str, Any], pre: str) -> None:
    """Add the vocabulary of a byte-level tokenizer.json."""
    tokens, added = tokens_of(spec)
    known = {*spec["model"]["vocab"].values(), *added}
    kinds = [
        UNUSED
        if at not in known
        else NORMAL
        if at not in added
        else CONTROL
        if added[at]["special"] or looks_special(added[at]["content"])
        else USER_DEFINED
        for at in range(len(tokens))
    ]
    merges = [one if isinstance(one, str) else " ".join(one) for one in spec["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)


def write_sentencepiece(
    path: Path, pieces: list[tuple[str, float, int]], added: dict[int, dict[str, Any]], *, prefix: bool
) -> Path:
    """Write the twin of a SentencePiece vocabulary with the tokens that tokenizer_config.json adds."""
    rows = list(pieces)
    for at, entry in sorted(added.items()):
        text, special = entry["content"], entry["special"] or looks_special(entry["content"])
        row = (text, -1000.0, CONTROL) if special else (text.replace(SPACE, " "), -1000.0, USER_DEFINED)
        if at < len(rows):
            rows[at] = row if rows[at][2] != UNKNOWN else rows[at]
        else:
            rows.append(row)
    writer = _writer(path)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _, _ in rows])
    writer.add_token_scores([score for _, score, _ in rows])
    writer.add_token_types([kind for _, _, kind in rows])
    if not prefix:
        writer.add_add_space_prefix(False)
    return _written(writer, path)


def scored_pieces(spec: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Return the pieces of a tokenizer.json made of a SentencePiece model, whose scores went by place."""
    tokens, added = tokens_of(spec)
    rows = []
    for at, text in enumerate(tokens):
        byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kind = BYTE if byte else UNKNOWN if text == spec["model"]["unk_token"] else NORMAL
        run = len(text) > 1 and not text.strip(SPACE)
        score = 0.0 if kind != NORMAL or at in added else _OF_RUNS if run else -float(at)
        rows.append((text, score, kind))
    return rows


def _writer(path: Path) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    return writer


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
