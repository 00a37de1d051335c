"""Tiny random models of the families with experts, as transformers computes and saves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from diptych.engine.backends.torch import experts
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model
from diptych.engine.runner import Runner
from kernels.route_experts import route_experts

BLOCK = 16
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 3,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
QWEN: dict[str, Any] = {**SIZES, "intermediate_size": 92, "moe_intermediate_size": 38, "num_experts": 10}
LOCAL: dict[str, Any] = {**SIZES, "intermediate_size": 38, "num_local_experts": 10}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "truncate": False,
}
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 6,
    "intermediate_size": 92,
    "moe_intermediate_size": 38,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 10,
    "v_head_dim": 18,
    "first_k_dense_replace": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**QWEN, head_dim=20, norm_topk_prob=True),
    "qwen3_moe-dense-layers": Qwen3MoeConfig(
        **QWEN, head_dim=20, mlp_only_layers=[0], use_sliding_window=True, sliding_window=19
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **{**QWEN, "num_attention_heads": 7, "num_key_value_heads": 7},
        shared_expert_intermediate_size=46,
        decoder_sparse_step=2,
    ),
    "mixtral": MixtralConfig(**LOCAL, head_dim=20, sliding_window=21),
    "olmoe": OlmoeConfig(**{**SIZES, "hidden_size": 96, "intermediate_size": 38}, num_experts=10),
    "granitemoe": GraniteMoeConfig(
        **{**LOCAL, "hidden_size": 96},
        embedding_multiplier=3.0,
        logits_scaling=1.7,
        residual_multiplier=0.6,
        attention_multiplier=0.31,
    ),
    "gpt_oss": GptOssConfig(**LOCAL, head_dim=20, sliding_window=11, rope_parameters=YARN, swiglu_limit=1.1),
    "glm4_moe": Glm4MoeConfig(
        **SIZES,
        intermediate_size=92,
        moe_intermediate_size=38,
        n_routed_experts=10,
        n_shared_experts=2,
        routed_scaling_factor=1.8,
        head_dim=20,
        partial_rotary_factor=0.6,
        use_qk_norm=True,
        attention_bias=True,
        first_k_dense_replace=2,
        num_mtp_layers=0,
    ),
    "deepseek_v2": DeepseekV2Config(
        **LATENT,
        q_lora_rank=None,
        n_routed_experts=12,
        n_shared_experts=2,
        routed_scaling_factor=1.8,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "deepseek_v2-greedy": DeepseekV2Config(**LATENT, q_lora_rank=26, n_routed_experts=10),
    "deepseek_v3": DeepseekV3Config(
        **LATENT,
        q_lora_rank=26,
        n_routed_experts=12,
        n_group=3,
        topk_group=2,
        num_mtp_layers=0,
        attention_bias=True,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
}
OTHER_CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2_moe-every-layer": Qwen2MoeConfig(
        **{**QWEN, "num_attention_heads": 7, "num_key_value_heads": 7}, shared_expert_intermediate_size=46
    ),
    "gpt_oss-limit": GptOssConfig(**LOCAL, head_dim=20, sliding_window=11, rope_parameters=YARN),
    "gpt_oss-wide": GptOssConfig(
        **{**LOCAL, "hidden_size": 96, "intermediate_size": 64}, head_dim=20, sliding_window=11
    ),
    "deepseek_v2-yarn": DeepseekV2Config(
        **LATENT,
        q_lora_rank=None,
        n_routed_experts=12,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        rope_parameters={**YARN, "truncate": True, "mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek_v3-plain": DeepseekV3Config(
        **LATENT, q_lora_rank=26, n_routed_experts=12, n_group=3, topk_group=2, num_mtp_layers=0
    ),
    "qwen3_moe-wide": Qwen3MoeConfig(
        **{**QWEN, "hidden_size": 96, "moe_intermediate_size": 64}, head_dim=32, norm_topk_prob=True
    ),
    "mixtral-wide": MixtralConfig(**{**LOCAL, "hidden_size": 96, "intermediate_size": 64}, head_dim=32),
}
SEEDS = {
    "qwen3_moe": 1,
    "qwen3_moe-dense-layers": 3,
    "qwen2_moe": 1,
    "mixtral": 2,
    "olmoe": 3,
    "granitemoe": 2,
    "gpt_oss": 1,
    "gpt_oss-limit": 2,
    "glm4_moe": 3,
    "deepseek_v3": 12,
}
"""Seeds whose models choose experts with gaps above 1e-3 in all tests."""


def oracle_of(name: str, seed: int | None = None) -> Any:
    """Return a random model, whose routers choose clearly."""
    config = {**CONFIGS, **OTHER_CONFIGS}[name]
    return random_oracle(config, SEEDS.get(name, 1) if seed is None else seed)


def random_oracle(config: PreTrainedConfig, seed: int) -> Any:
    """Return a random model of `config`, as `oracle_of` does."""
    torch.manual_seed(seed)
    oracle = (
        AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        .eval()
        .float()
    )
    sharp = 0.6 if any("e_score" in key for key, _ in oracle.named_buffers()) else 2.0
    with torch.no_grad():
        for key, tensor in [*oracle.named_parameters(), *oracle.named_buffers()]:
            if key.endswith("inv_freq"):
                continue
            router = any(part in key for part in (".gate.weight", "router.weight"))
            bias = key.endswith(("bias", "sinks")) or "_bias" in key
            scale = sharp if router else 0.5 if bias or "norm" in key else 0.15
            if "e_score_correction_bias" in key:
                scale = 1.2
            tensor.normal_(1.0 if "norm" in key else 0.0, scale)
    return oracle


@contextmanager
def recorded_gaps() -> Iterator[list[float]]:
    """Record how far the last picked and the first unpicked expert of every row are apart."""
    gaps: list[float] = []

    def recording(
        logits: torch.Tensor, correction: torch.Tensor | None = None, **choice: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.sigmoid(logits) if choice["routing"] == "sigmoid" else logits
        chances = scores if correction is None else scores + correction
        count, groups = choice["count"], choice["groups"]
        if groups > 1:
            best = 1 if choice["group_score"] == "best" else 2
            grouped = chances.unflatten(-1, (groups, -1))
            found = grouped.topk(best, dim=-1).values.sum(-1).sort(dim=-1, descending=True)
            picked = choice["groups_per_token"]
            gaps.extend((found.values[:, picked - 1] - found.values[:, picked]).tolist())
            allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool)
            allowed.scatter_(1, found.indices[:, :picked], True)
            chances = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
        ordered = chances.sort(dim=-1, descending=True).values
        gaps.extend((ordered[:, count - 1] - ordered[:, count]).tolist())
        return route_experts(logits, correction, **choice)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(experts, "route_experts", recording)
        yield gaps


def prompts(vocab: int = 131) -> list[list[int]]:
    """Return sixteen prompts of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 2, 3, 5, 7, 8, 11, 15, 16, 17, 20, 23, 27, 31, 33, 40]
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Model, asked: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return `count` greedy tokens after each prompt, prompts in chunks beside decode rows."""
    runner = Runner(model, threads=1)
    layout = model.kv_layout(BLOCK)
    each = layout.blocks_for(max(map(len, asked)) + count)
    memory = KVMemory(layout, each * len(asked))
    memory.data.fill_(torch.nan)
    pool = BlockPool(memory.num_blocks)
    tables = [pool.allocate(each) for _ in asked]
    tokens, computed = [list(prompt) for prompt in asked], [0] * len(asked)
    while any(len(t) < len(p) + count for t, p in zip(tokens, asked, strict=True)):
        steps, rows = [], []
        for row, known in enumerate(tokens):
            if len(known) == len(asked[row]) + count:
                continue
            end = min(len(known), computed[row] + 13)
            wants = end == len(known)
            steps.append(SequenceStep(memory, tables[row], computed[row], known[computed[row] : end], wants))
            rows += [row] if wants else []
            computed[row] = end
        for row, logits in zip(rows, runner.step(steps), strict=True):
            tokens[row].append(int(logits.argmax()))
    return [known[len(prompt) :] for known, prompt in zip(tokens, asked, strict=True)]


def oracle_logits(oracle: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits after every token: `[tokens, vocab]`."""
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.tensor([list(ids)])).logits[0]
    return logits


def is_greedy(oracle: Any, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Return whether each of `tokens` is transformers' likeliest one after all before it."""
    logits = oracle_logits(oracle, [*prompt, *tokens])[len(prompt) - 1 : -1]
    return logits.argmax(dim=-1).tolist() == list(tokens)


def all_logits(model: Model, ids: Sequence[int], chunk: int) -> torch.Tensor:
    """Return logits after every token, computed in chunks through shuffled blocks: `[tokens, vocab]`."""
    layout = model.kv_layout(BLOCK)
    memory = KVMemory(layout, 20)
    memory.data.fill_(torch.nan)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()
    runner, rows = Runner(model, threads=1), []
    for start in range(0, len(ids), chunk):
        part = list(ids[start : start + chunk])
        rows.append(runner.step([SequenceStep(memory, table, start, part, True, trailing=len(part))]).clone())
    return torch.cat(rows)
