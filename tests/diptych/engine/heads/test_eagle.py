"""EAGLE heads of the first kind equal a layer of transformers; which files are read, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from diptych.engine.heads.eagle3_files import is_eagle3
from diptych.engine.heads.eagle_files import is_eagle, read_eagle
from diptych.engine.heads.feature_head import FeatureHead, HeadStep
from diptych.engine.heads.head_files import BadHeads
from diptych.engine.heads.layer_head import LayerHead
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import ModelShape
from tests.diptych.engine.heads import test_eagle3
from tests.kernels.cpu.tiny_models import shape_of

HIDDEN, VOCAB, INNER = 16, 61, 20
MODEL = shape_of(vocab_size=VOCAB, hidden_size=HIDDEN, num_heads=2, num_kv_heads=1, head_dim=8, num_layers=4)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
SIZES: dict[str, tuple[int, ...]] = {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "fc.bias": (HIDDEN,),
    "layers.0.self_attn.q_proj.weight": (16, HIDDEN),
    "layers.0.self_attn.k_proj.weight": (8, HIDDEN),
    "layers.0.self_attn.v_proj.weight": (8, HIDDEN),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, 16),
    "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    "layers.0.post_attention_layernorm.weight": (HIDDEN,),
}
EMBED, OUTPUT = (torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in (1, 2))


def tensors() -> dict[str, torch.Tensor]:
    """Return random weights by the authors' names."""
    generator = torch.Generator().manual_seed(4)
    scale = {"layers.0.self_attn.q_proj.weight": 0.05}  # attention to several tokens, not to one alone
    return {
        name: torch.randn(size, generator=generator) * scale.get(name, 0.5) for name, size in SIZES.items()
    }


def write(folder: Path, some: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(some, folder / "model.safetensors")
    return folder


def read(path: Path, model: ModelShape = MODEL) -> LayerHead:
    return read_eagle(path, model, EMBED, lambda: OUTPUT, torch.float32)


def expected(tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return what transformers' layer without its first norm gives of the authors' product."""
    of, config = tensors(), LlamaConfig(**CONFIG, attention_bias=False, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, 0)
    layer.load_state_dict(
        {name.removeprefix("layers.0."): t for name, t in of.items() if name.startswith("layers.0.")},
        strict=False,
    )
    layer.input_layernorm = nn.Identity()
    x = torch.cat([EMBED[tokens], features], -1) @ of["fc.weight"].T + of["fc.bias"]
    positions = torch.arange(len(tokens))[None]
    mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1)
    with torch.no_grad():
        angles = LlamaRotaryEmbedding(config)(x[None], positions)
        found: torch.Tensor = layer(x[None], attention_mask=mask, position_embeddings=angles)[0]
    return found


def test_a_head_equals_transformers_layer_in_blocks_and_in_chunks(tmp_path: Path) -> None:
    head = read(write(tmp_path / "head", tensors()))
    assert head.layers == (4,)
    tokens = torch.arange(9) * 5 + 2
    features = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(8))
    wanted = expected(tokens, features)
    memory, table = KVMemory(head.kv_layout(4), 6), [5, 1, 3]
    other = HeadStep([0, 2, 4], 0, [1, 2], features[:2])
    got = [head.step(memory, [HeadStep(table, 0, tokens[:5].tolist(), head.fuse(features[:5])), other])[:5]]
    got.append(head.step(memory, [other, HeadStep(table, 5, tokens[5:].tolist(), features[5:])])[2:])
    torch.testing.assert_close(torch.cat(got), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.logits(wanted), wanted @ OUTPUT.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_nodes_of_a_tree_have_what_chains_of_their_ancestors_have(form: str, tmp_path: Path) -> None:
    """The tree is 11 with 12 and 13 after it, and 14 after 13."""
    if form == "eagle":
        head: FeatureHead = read(write(tmp_path / "head", tensors()))
    else:
        some = test_eagle3.tensors()
        some["midlayer.self_attn.q_proj.weight"] *= 0.1
        path = test_eagle3.write(tmp_path / "head", some, eagle_aux_hidden_state_layer_ids=[0, 2, 3])
        head = test_eagle3.read(path)
    tokens, parents = [11, 12, 13, 14], [-1, 0, 0, 2]
    features = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(8))

    def after(*places: int, tree: bool = False) -> torch.Tensor:
        memory = KVMemory(head.kv_layout(4), 2)
        head.step(memory, [HeadStep([1, 0], 0, [5, 6, 7, 8], features[:4])])
        own = features[[4 + place for place in places]]
        some = [tokens[place] for place in places]
        return head.step(memory, [HeadStep([1, 0], 4, some, own, parents if tree else None)])

    whole = after(0, 1, 2, 3, tree=True)
    for chain in ((0, 1), (0, 2, 3)):
        torch.testing.assert_close(whole[chain[-1]], after(*chain)[-1], atol=1e-4, rtol=1e-5)
    assert not torch.allclose(whole[3], after(0, 1, 2, 3)[3], atol=1e-2)  # a control: brothers are seen


def test_files_are_known_by_all_names_of_the_form(tmp_path: Path) -> None:
    good = tensors()
    own = {"embed_tokens.weight": EMBED * 2, "lm_head.weight": OUTPUT * 2}
    folders = [
        write(tmp_path / "authors", good),
        write(tmp_path / "sglang", good, architectures=["LlamaForCausalLMEagle"]),
        write(tmp_path / "prefixed", {f"model.{name}": tensor for name, tensor in good.items()}),
        write(tmp_path / "vllm", good | own, model_type="eagle", architectures=["EAGLEModel"], model=CONFIG),
    ]
    tokens, features = [3, 1, 4], torch.ones(3, HIDDEN)
    found = []
    for folder in folders:
        assert is_eagle(folder), folder
        assert not is_eagle3(folder)
        head = read(folder)
        given = head.step(KVMemory(head.kv_layout(4), 1), [HeadStep([0], 0, tokens, features)])
        found.append(head.logits(given))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[3])
    assert not is_eagle(write(tmp_path / "llama", {"model.embed_tokens.weight": EMBED}))
    assert not is_eagle(write(tmp_path / "eagle3", good, architectures=["LlamaForCausalLMEagle3"]))
    assert not is_eagle(write(tmp_path / "speculators", good, speculators_model_type="eagle"))
    assert not is_eagle(tmp_path)


def test_broken_missing_and_other_heads_are_refused_in_words(tmp_path: Path) -> None:
    number = iter(range(100))

    def refused(words: str, some: dict[str, torch.Tensor], shape: ModelShape = MODEL, **config: Any) -> None:
        with pytest.raises(BadHeads, match=words):
            read(write(tmp_path / str(next(number)), some, **config), shape)

    good = tensors()
    refused("lacks self_attn.o_proj", {name: t for name, t in good.items() if "o_proj" not in name})
    refused("fc.weight is of 16 x 33", good | {"fc.weight": torch.zeros(16, 33)})
    refused("fc.bias has numbers that are not finite", good | {"fc.bias": good["fc.bias"] / 0})
    refused("a head of width 16, the model's is 24", good, replace(MODEL, hidden_size=24))
    refused("a head of 2 layers", good, num_hidden_layers=2)
    refused("for 50 tokens", good, vocab_size=50)
    first = "layers.0.input_layernorm.weight"
    refused(f"{first} is not computed", good | {first: EMBED})
    refused("biases of some", good | {"layers.0.self_attn.q_proj.bias": torch.ones(16)})
    refused("add_para_norm True is not computed", good, model={**CONFIG, "add_para_norm": True})
    refused("truncated_vocab_size 9", good, truncated_vocab_size=9)
    (tmp_path / "0" / "model.safetensors").unlink()
    with pytest.raises(BadHeads, match="pickles, which are never read"):
        read(tmp_path / "0")
