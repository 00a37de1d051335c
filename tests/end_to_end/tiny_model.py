"""A small model with random weights and a tokenizer of its own: quick enough to be asked in every way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder

CONTEXT = 768


def write(
    folder: Path,
    added: Sequence[str] = (),
    config_class: type[PreTrainedConfig] = LlamaConfig,
    **sizes: int,
) -> Path:
    """A Hugging Face folder. The end of sequence is likely enough to occur in short answers.

    `sizes` are fields of the config with other values. `added` are more tokens, control tokens if they begin
    as those of gpt-oss or Mistral do.
    """
    tokenizer = byte_level(vocab_size=320)
    for text in added:
        special = text.startswith(("<|", "["))
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
    write_folder(folder, tokenizer)
    torch.manual_seed(11)
    fields: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size() + 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.token_to_id("<s>"),
        "eos_token_id": tokenizer.token_to_id("</s>"),
    }
    config = config_class(**fields | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@functools.cache
def oracle(folder: Path) -> Any:
    """transformers' own."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def log_softmax(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """By transformers, after each token: `[tokens, vocab]`."""
    with torch.inference_mode():
        return torch.log_softmax(oracle(folder)(torch.tensor([list(token_ids)])).logits[0].float(), -1)


def aggregated(folder: Path, blocks: int = 200) -> tuple[Runner, KVMemory, BlockPool]:
    """What the functions of diptych/engine/generate.py want first."""
    model = load_model(folder, torch.float32, backend="native")
    return Runner(model, 1), KVMemory(model.kv_layout(16), blocks), BlockPool(blocks)


def prompt(seed: int, length: int) -> list[int]:
    """Token ids without control tokens."""
    ids: list[int] = torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids
