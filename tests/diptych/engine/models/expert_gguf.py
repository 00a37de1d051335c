"""Tiny models with experts written as GGUF files in the way of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.diptych.engine.weights.gguf_files import add_value, finish, interleaved

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
    ("self_attn.sinks", "attn_sinks.weight"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("input_layernorm", "attn_norm"),
    ("block_sparse_moe.router", "ffn_gate_inp"),
    ("block_sparse_moe.experts", "mlp.experts"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
]
ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "qwen2_moe-every-layer": "qwen2moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "gpt_oss-limit": "gpt-oss",
    "glm4_moe": "glm4moe",
    "deepseek_v2-yarn": "deepseek2",
    "deepseek_v2-greedy": "deepseek2",
    "deepseek_v3-plain": "deepseek2",
}
_INTERLEAVED = ("llama", "granitemoe")


def write(oracle: Any, path: Path, architecture: str, kind: gguf.GGMLQuantizationType | None = None) -> None:
    """Write `oracle` as a GGUF file, the experts' matrices in `kind` if it is given."""
    config = oracle.config
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = getattr(oracle.model.layers[0].self_attn, "head_dim", 0)
    inner = getattr(config, "moe_intermediate_size", None)
    keys: dict[str, object] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": _first(config, "n_routed_experts", "num_local_experts", "num_experts"),
        "expert_used_count": config.num_experts_per_tok,
        **({"expert_feed_forward_length": inner} if inner else {}),
        **_own_keys(config, architecture, head_dim),
    }
    for key, value in keys.items():
        add_value(writer, f"{architecture}.{key}", value)
    for name, tensor in oracle.state_dict().items():
        for stored, array in _tensors(name, tensor.float().numpy(), config, architecture):
            if kind is not None and stored.endswith("exps.weight"):
                writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(stored, np.ascontiguousarray(array))
    finish(writer)


def _first(config: Any, *names: str) -> int:
    return next(int(getattr(config, name)) for name in names if hasattr(config, name))


def _own_keys(config: Any, architecture: str, head_dim: int) -> dict[str, object]:
    match architecture:
        case "llama":
            return {"attention.sliding_window": config.sliding_window}
        case "qwen2moe":
            return {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
        case "granitemoe":
            return {
                "attention.scale": config.attention_multiplier,
                "embedding_scale": config.embedding_multiplier,
                "residual_scale": config.residual_multiplier,
                "logit_scale": config.logits_scaling,
            }
        case "gpt-oss":
            rope = config.rope_parameters
            return {
                "attention.sliding_window": config.sliding_window,
                "expert_feed_forward_length": config.intermediate_size,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(rope["factor"]),
                "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            }
        case "deepseek2":
            return _latent_keys(config)
        case "glm4moe":
            rotated = int(head_dim * config.rope_parameters["partial_rotary_factor"])
            return {
                "rope.dimension_count": rotated,
                "expert_shared_count": config.n_shared_experts,
                "leading_dense_block_count": config.first_k_dense_replace,
                "expert_gating_func": 2,
                "expert_weights_norm": bool(config.norm_topk_prob),
                "expert_weights_scale": float(config.routed_scaling_factor),
            }
    return {}


def _latent_keys(config: Any) -> dict[str, object]:
    rope, sigmoid = config.rope_parameters, config.model_type == "deepseek_v3"
    grouped = sigmoid or config.topk_method == "group_limited_greedy"
    keys: dict[str, object] = {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_shared_count": config.n_shared_experts,
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_weights_norm": bool(sigmoid and config.norm_topk_prob),
        "expert_weights_scale": float(config.routed_scaling_factor),
    }
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if grouped:
        keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return keys


def _keys_and_values(name: str, array: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """Split what makes keys and values of latents, keys transposed."""
    plain, value = config.qk_nope_head_dim, config.v_head_dim
    both = array.reshape(config.num_attention_heads, plain + value, config.kv_lora_rank)
    layer = name.split("self_attn")[0]
    return [
        (f"{layer}attn_k_b.weight", both[:, :plain].swapaxes(1, 2)),
        (f"{layer}attn_v_b.weight", both[:, plain:]),
    ]


def _tensors(name: str, array: np.ndarray, config: Any, architecture: str) -> list[tuple[str, np.ndarray]]:
    """Return the names and numbers that one of transformers' tensors has in the file."""
    after = "post_attention_norm" if architecture in ("gpt-oss", "glm4moe") else "ffn_norm"
    for theirs, ours in [("post_attention_layernorm", after), *NAMES]:
        name = name.replace(theirs, ours)
    if "kv_b_proj" in name:
        return _keys_and_values(name, array, config)
    layer = name.split("mlp.experts")[0]
    if "gate_up_proj" in name:
        ending = "bias" if name.endswith("bias") else "weight"
        if architecture == "gpt-oss":
            rows = array if ending == "bias" else array.swapaxes(1, 2)
            gate, up = rows[:, ::2], rows[:, 1::2]
        else:
            gate, up = np.split(array, 2, axis=1)
        return [(f"{layer}ffn_gate_exps.{ending}", gate), (f"{layer}ffn_up_exps.{ending}", up)]
    if "experts.down_proj" in name:
        if name.endswith("bias"):
            return [(f"{layer}ffn_down_exps.bias", array)]
        down = array.swapaxes(1, 2) if architecture == "gpt-oss" else array
        return [(f"{layer}ffn_down_exps.weight", down)]
    if architecture in _INTERLEAVED and ("attn_q." in name or "attn_k." in name):
        heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
        array = interleaved(array, heads)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        array = array.reshape(-1)
    return [(name, array)]
