"""Shapes of well-known models, from the sizes in their published configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}


def _llama(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, context: int
) -> dict[str, Any]:
    return {
        **_LLAMA,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


LLAMA_7B = _llama(32000, 4096, 11008, 32, 32, 32, 4096)
LLAMA_3_8B = _llama(128256, 4096, 14336, 32, 32, 8, 8192)
LLAMA_3_70B = _llama(128256, 8192, 28672, 80, 64, 8, 8192)
LLAMA_3_405B = _llama(128256, 16384, 53248, 126, 128, 8, 131072)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """Write a `config.json` into `folder`, and return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path
