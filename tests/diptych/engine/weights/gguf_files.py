"""Small models written as GGUF files in the way of llama.cpp's converter, and what comes out of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-factors": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=40),
}
NAMES = [
    ("model.embed_tokens", "token_embd"),
    ("model.layers.", "blk."),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file with all that was added, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(
    oracle: Any,
    path: Path,
    family: str,
    quantise: bool = False,
    but: str = "nothing",
    metadata: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    tensors_a_part: int = 0,
    blocks: Mapping[str, tuple[str, np.ndarray]] | None = None,
) -> None:
    """`oracle` as a GGUF file; tensors named `but` stay float32. `metadata` (below the family's prefix) and
    `tensors` are added. `tensors_a_part`: into how large parts the file is split; 0: not at all.
    `blocks`: formats and blocks of parameters, in llama.cpp's order of rows.
    """
    config = oracle.config
    writer = gguf.GGUFWriter(path, family, split_max_tensors=tensors_a_part)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(oracle.model.layers[0].self_attn.head_dim)
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(9)
    for key, value in (metadata or {}).items():
        add_value(writer, f"{family}.{key}", value)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array.astype(np.float32))
    if config.rope_parameters["rope_type"] == "llama3":
        inverse = oracle.model.rotary_emb.inv_freq
        plain = 1.0 / 10000.0 ** (torch.arange(len(inverse)) / len(inverse))
        writer.add_tensor("rope_freqs.weight", (plain / inverse).float().numpy())
    for name, parameter in oracle.named_parameters():
        stored, array = name, parameter.detach().numpy()
        for theirs, ours in NAMES:
            stored = stored.replace(theirs, ours)
        if family == "llama" and ("attn_q." in stored or "attn_k." in stored):
            heads = config.num_attention_heads if "attn_q" in stored else config.num_key_value_heads
            array = interleaved(array, heads)
        if blocks is not None and name in blocks:
            kind = gguf.GGMLQuantizationType[blocks[name][0].upper()]
            writer.add_tensor(stored, blocks[name][1], raw_dtype=kind)
        elif quantise and array.ndim == 2 and but not in stored:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(array))
    finish(writer)


def oracle_of(name: str, rope: dict[str, Any] | None = None) -> Any:
    """Return a random model; `rope` is its rotation, if not that of the config of that name."""
    torch.manual_seed(4)
    config = LlamaConfig(**SIZES, rope_parameters=rope) if rope else CONFIGS[name]
    oracle = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return oracle


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    model = load_model(path, torch.float32, backend="torch")
    memory = KVMemory(model.kv_layout(16), 4)
    return Runner(model, 1).step([SequenceStep(memory, [2, 0, 3], 0, ids, True)])[0]
