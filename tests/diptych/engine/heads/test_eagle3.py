"""EAGLE-3 heads: what they compute, which files are read, and what is refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from diptych.engine.heads.eagle3 import NEVER, Eagle3Head, HeadStep
from diptych.engine.heads.eagle3_files import is_eagle3, read_eagle3
from diptych.engine.heads.head_files import BadHeads
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.rope import cos_sin
from diptych.engine.models.shape import ModelShape
from tests.kernels.cpu.tiny_models import shape_of

MODEL = shape_of(vocab_size=61, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, num_layers=4)
HIDDEN, DRAFTS, INNER = 16, 40, 20
EMBED = torch.randn(61, HIDDEN, generator=torch.Generator().manual_seed(1))
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFTS,
    "vocab_size": 61,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def shapes(hidden: int, inner: int, drafts: int) -> dict[str, tuple[int, ...]]:
    """Return the authors' names and the sizes of a head with two heads of eight numbers, and one KV head."""
    return {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (16, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (8, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (8, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, 16),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafts, hidden),
    }


def tensors() -> dict[str, torch.Tensor]:
    """Return random weights by the authors' names."""
    generator = torch.Generator().manual_seed(4)
    sizes = shapes(HIDDEN, INNER, DRAFTS)
    found = {name: torch.randn(size, generator=generator) * 0.5 for name, size in sizes.items()}
    found["d2t"] = torch.arange(DRAFTS) // 2  # token 3 * i // 2 of the model is number i
    found["t2d"] = torch.zeros(61, dtype=torch.bool)
    return found


def write(folder: Path, some: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(some, folder / "model.safetensors")
    return folder


def read(path: Path, model: ModelShape = MODEL, embed: torch.Tensor = EMBED) -> Eagle3Head:
    shape, weights = read_eagle3(path, model, embed, torch.float32)
    return Eagle3Head(shape, weights, model.vocab_size)


def expected(head: Eagle3Head, tokens: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
    """Return the features that follow, written out as in the paper, without blocks."""
    of = tensors()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = of[f"midlayer.{name}.weight"]
        return functional.rms_norm(x, (HIDDEN,), weight, 1e-5)

    def turned(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (part[:, None] for part in cos_sin(head.shape, 0, torch.arange(len(tokens))))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    both = torch.cat([norm(EMBED[tokens], "input_layernorm"), norm(feature, "hidden_norm")], -1)
    q, k, v = ((both @ of[f"midlayer.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, 8)) for n in "qkv")
    q, k = turned(q), turned(k)
    mixed = functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1).repeat(2, 1, 1),
        v.transpose(0, 1).repeat(2, 1, 1),
        is_causal=True,
    )
    x = feature + mixed.transpose(0, 1).flatten(1) @ of["midlayer.self_attn.o_proj.weight"].T
    normed = norm(x, "post_attention_layernorm")
    gate, up = (normed @ of[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (functional.silu(gate) * up) @ of["midlayer.mlp.down_proj.weight"].T


def test_a_head_computes_the_papers_layer_in_blocks_and_in_chunks(tmp_path: Path) -> None:
    path = write(tmp_path / "head", tensors(), eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    assert is_eagle3(path)
    head = read(path)
    assert head.layers == (0, 2, 3)
    tokens = torch.arange(9) * 5 + 2
    features = torch.randn(9, 3 * HIDDEN, generator=torch.Generator().manual_seed(8))
    fused = head.fuse(features)
    torch.testing.assert_close(fused, features @ tensors()["fc.weight"].T)
    wanted = expected(head, tokens, fused)
    memory, table = KVMemory(head.kv_layout(4), 6), [5, 1, 3]
    other = HeadStep([0, 2, 4], 0, [1, 2], fused[:2])
    got = [head.step(memory, [HeadStep(table, 0, tokens[:5].tolist(), fused[:5]), other])[:5]]
    got.append(head.step(memory, [other, HeadStep(table, 5, tokens[5:].tolist(), fused[5:])])[2:])
    torch.testing.assert_close(torch.cat(got), wanted, atol=1e-4, rtol=1e-4)
    logits = head.logits(wanted)
    drafted = [number + number // 2 for number in range(DRAFTS)]
    of_head = (
        functional.rms_norm(wanted, (HIDDEN,), tensors()["norm.weight"], 1e-5) @ tensors()["lm_head.weight"].T
    )
    torch.testing.assert_close(logits[:, drafted], of_head, atol=1e-4, rtol=1e-4)
    assert (logits == NEVER).sum() == 9 * (61 - DRAFTS)


def test_broken_missing_and_other_heads_are_refused_in_words(tmp_path: Path) -> None:
    number = iter(range(100))

    def refused(words: str, some: dict[str, torch.Tensor], model: ModelShape = MODEL, **config: Any) -> None:
        ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        with pytest.raises(BadHeads, match=words):
            read(write(tmp_path / str(next(number)), some, **ids | config), model)

    good = tensors()
    wide = replace(MODEL, hidden_size=24)
    refused("fc.weight is of 16 x 48, for this model it would be 16 x 72", good, wide)
    refused("lacks midlayer|lacks self_attn.o_proj", {n: t for n, t in good.items() if "o_proj" not in n})
    refused("not finite", good | {"norm.weight": good["norm.weight"] / 0})
    refused("drafts tokens that the model's vocabulary of 61 lacks", good | {"d2t": good["d2t"] * 9})
    refused("d2t has 3 numbers", good | {"d2t": good["d2t"][:3]})
    refused("reads layers", good, eagle_aux_hidden_state_layer_ids=[0, 1, 4])
    refused("a head of 2 layers", good, num_hidden_layers=2)
    refused("for 50 tokens", good, vocab_size=50)
    with pytest.raises(BadHeads, match="has to be 8"):
        read(
            write(tmp_path / "narrow", good, eagle_aux_hidden_state_layer_ids=[0, 1, 2]), MODEL, EMBED[:, :8]
        )
    (tmp_path / "narrow" / "model.safetensors").unlink()
    with pytest.raises(BadHeads, match="no safetensors files"):
        read(tmp_path / "narrow")
    assert not is_eagle3(tmp_path)
