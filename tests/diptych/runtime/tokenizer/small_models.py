"""Small vocabularies, trained on the spot and written as GGUF files and Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>",)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TRAINING = [
    "the quick brown fox jumps over the lazy dog, doesn't it? We'll see 12345 of them in 2026.",
    "def f(x):\n    return x + 1\n\n\nprint(f(41))  # trailing\t\ttabs   and   spaces",
    "naïve café über straße 你好，世界 😀😃 ½ ٣ a\u0301",
] * 8


def spellable_text(max_size: int = 40) -> st.SearchStrategy[str]:
    """Text that SmolLM2 can spell: its vocabulary lacks six control bytes and those of unassigned planes."""
    return st.text(
        st.characters(exclude_categories=("Cc", "Cs", "Cn")) | st.sampled_from("\n\t\r"), max_size=max_size
    )


def byte_level(pre_tokenizer: Any = None, vocab_size: int = 600) -> Tokenizer:
    """A byte-level BPE tokenizer; its special tokens come after the trained vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _TRAINING, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    _add_tokens(tokenizer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """As Llama 2's tokenizer.json in its current form: metaspace before the first text, byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=["<unk>", *byte_tokens], show_progress=False, limit_alphabet=60
    )
    # Trained word by word, so that no merge crosses a space; used on whole text, as Llama 2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.train_from_iterator(_TRAINING, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] == "<unk>"]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add_tokens(tokenizer)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def composed(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _add_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in USER_DEFINED])


def write_folder(folder: Path, tokenizer: Tokenizer, **files: object) -> Path:
    """tokenizer.json, config.json, and what else is given as name=content (dict = JSON, str = text)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size() + 8, "max_position_embeddings": 512}
    for name, content in ({"config": config} | files).items():
        if isinstance(content, str):
            (folder / f"{name}.jinja").write_text(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_gguf(
    path: Path,
    tokenizer: Tokenizer,
    pre: str,
    *,
    without: str = "",
    templates: Sequence[Mapping[str, str]] | None = None,
    **extra: object,
) -> Path:
    """A GGUF file without tensors; ``extra`` adds or replaces tokenizer keys, ``without`` leaves one out."""
    spec = json.loads(tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    kinds = [3 if token in CONTROL else 4 if token in USER_DEFINED else 1 for token in tokens]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    fields: dict[str, object] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": merges,
        "bos_token_id": tokenizer.token_to_id("<s>"),
        "eos_token_id": tokenizer.token_to_id("</s>"),
    } | extra
    for name, value in fields.items():
        if name == without:
            continue
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, str(value))
    writer.add_chat_template(CHATML if templates is None else templates)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
