"""The tokenizer of a Hugging Face model folder: ``tokenizer.json`` and the small files beside it.

Reads tokenizer.json or another form of the vocabulary (folder_files.py), config.json, generation_config.json,
tokenizer_config.json, special_tokens_map.json, chat_template.jinja and
additional_chat_templates/tool_use.jinja.
Byte-level BPE (Llama 3, Qwen, GPT-2, SmolLM) and SentencePiece-style BPE with byte fallback (Llama 2,
Mistral) are understood; what else a tokenizer.json may hold is refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import tokenizers

from diptych.runtime.model_context import folder_context
from diptych.runtime.tokenizer.end_tokens import declared_ids, turn_end_ids, union
from diptych.runtime.tokenizer.folder_files import TOKENIZER_JSON, json_object, read_vocabulary
from diptych.runtime.tokenizer.source import AddedToken, TokenizerSource, UnusableTokenizer

Json = dict[str, Any]

_TURN_BEGINNINGS: Final = frozenset({"<｜User｜>", "<｜Assistant｜>"})
"""DeepSeek's, which its tokenizer.json does not call special; a caller's text must not begin a turn."""


def read(folder: Path) -> TokenizerSource:
    """Return the tokenizer of the model in ``folder``. Raises `UnusableTokenizer` or `OSError`."""
    config = _optional(folder / "config.json")
    tokenizer_config = _optional(folder / "tokenizer_config.json")
    data, own_names = read_vocabulary(folder, tokenizer_config)
    tokenizer_config = own_names | tokenizer_config
    spec = json_object(TOKENIZER_JSON, data)
    special_tokens = _optional(folder / "special_tokens_map.json")
    ends = [tokenizer_config.get("eos_token"), special_tokens.get("eos_token")]
    if "added_tokens_decoder" not in tokenizer_config:
        # Of before transformers 4.34, which wrote the names of special tokens beside the config.
        tokenizer_config |= special_tokens
    generation = _optional(folder / "generation_config.json")
    added = tuple(_added(entry) for entry in spec.get("added_tokens") or ())
    alphabet = _alphabet(spec)
    backend = _backend(data.decode("utf-8"))
    vocab_size = _required(config.get("vocab_size"), "vocab_size")
    templates = _chat_templates(folder, tokenizer_config)
    eos = [
        *declared_ids(generation.get("eos_token_id")),
        *declared_ids(config.get("eos_token_id")),
        *(backend.token_to_id(text) for text in map(_token_text, ends) if text is not None),
        *(turn_end_ids(added, list(templates.values())) if templates else ()),
    ]
    return TokenizerSource(
        backend=backend,
        continuation=_continuation(spec) or backend,
        added=added,
        alphabet=alphabet,
        strips_first_space=alphabet == "byte_fallback" and _strips_first_space(backend),
        vocab_size=vocab_size,
        max_context=_required(folder_context(config), "max_position_embeddings"),
        eos_token_ids=union(eos, vocab_size),
        digest=hashlib.sha256(data).hexdigest(),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        template_names=_template_names(tokenizer_config),
        generation_defaults=generation,
    )


def _optional(path: Path) -> Json:
    return json_object(path.name, path.read_bytes()) if path.is_file() else {}


def _backend(text: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the binding raises bare Exception
        raise UnusableTokenizer(f"tokenizer.json: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _added(entry: Json) -> AddedToken:
    text = str(entry["content"])
    return AddedToken(
        int(entry["id"]),
        text,
        control=bool(entry.get("special")) or text in _TURN_BEGINNINGS,
        takes_left_space=bool(entry.get("lstrip")),
        takes_right_space=bool(entry.get("rstrip")),
    )


def _steps(spec: Json, name: str) -> Iterator[Json]:
    """Return the steps of a pipeline entry, whether it is one step or a sequence of them."""
    entry = spec.get(name)
    if not isinstance(entry, dict):
        return
    nested = entry.get("pretokenizers") or entry.get("decoders") or entry.get("normalizers")
    if isinstance(nested, list):
        yield from (step for step in nested if isinstance(step, dict))
    else:
        yield entry


def _alphabet(spec: Json) -> Literal["byte_level", "byte_fallback"]:
    decoders = {str(step.get("type")) for step in _steps(spec, "decoder")}
    if "ByteLevel" in decoders:
        return "byte_level"
    if "ByteFallback" in decoders:
        return "byte_fallback"
    raise UnusableTokenizer(
        f"tokenizer.json decodes with {sorted(decoders)}; this build has byte-level and byte-fallback"
    )


def _strips_first_space(backend: tokenizers.Tokenizer) -> bool:
    """Ask the decoder: several of its steps can do it (Strip, Metaspace, Replace with a pattern)."""
    return bool(backend.decoder.decode(["\u2581a"]) == "a")


def _continuation(spec: Json) -> tokenizers.Tokenizer | None:
    """Return a twin that puts no space before its text, where the tokenizer puts one before the first text
    only.

    Text is encoded in pieces between control tokens; such a tokenizer adds the space once per prompt.
    """
    first_only = [step for step in _steps(spec, "pre_tokenizer") if step.get("prepend_scheme") == "first"]
    if not first_only:
        return None
    for step in first_only:
        step["prepend_scheme"] = "never"
    return _backend(json.dumps(spec))


def _required(value: object, key: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise UnusableTokenizer(f"config.json has no {key}")
    return value


def _token_text(entry: object) -> str | None:
    """Return a token of tokenizer_config.json, which is a string or an object with its content."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _template_names(tokenizer_config: Json) -> dict[str, str]:
    """Return the tokens that transformers hands to templates, a model's own (``image_token``) among them."""
    found = (
        (name, _token_text(entry)) for name, entry in tokenizer_config.items() if name.endswith("_token")
    )
    return {name: text for name, text in found if text is not None}


def _chat_templates(folder: Path, tokenizer_config: Json) -> dict[str, str]:
    """Return the templates by name: files if there are any, else what the config holds."""
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    if found:
        return found
    given = tokenizer_config.get("chat_template")
    entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {name: template for name, template in named.items() if isinstance(template, str)}
