"""Hugging Face folders that must be refused, each of which would else give other logits than its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from diptych.engine.dtype import Precision
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import BadModelFile
from diptych.engine.weights.checkpoint import read_checkpoint
from tests.diptych.engine.weights.quantised_folders import Tensors, change

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
HEAD = "lm_head.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    return tmp_path


def put(folder: Path, name: str, value: dict[str, Any]) -> None:
    """Put a JSON file into the folder; what is in one of that name and not in `value` stays."""
    path = folder / name
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**kept, **value}))


def eight_bits(dtype: torch.dtype) -> Callable[[Tensors], object]:
    """Return an edit that stores one matrix as numbers of eight bits, their scale beside them."""

    def edit(tensors: Tensors) -> None:
        scale = tensors[DOWN].abs().max() / 100
        tensors[DOWN] = (tensors[DOWN] / scale).to(dtype)
        tensors[f"{DOWN}_scale"] = scale

    return edit


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_numbers_of_eight_bits_are_refused_though_the_config_says_nothing(
    folder: Path, dtype: torch.dtype
) -> None:
    change(folder, eight_bits(dtype))
    with pytest.raises(UnsupportedModel, match=r"down_proj.*does not say how it is quantised"):
        read_checkpoint(folder, "fp32")


def test_a_mask_of_whole_numbers_is_not_taken_for_quantised(folder: Path) -> None:
    name = "model.layers.0.self_attn.masked_bias"
    change(folder, lambda tensors: tensors.update({name: torch.ones(1, dtype=torch.int64)}))
    with pytest.raises(UnsupportedModel, match=f"tensor {name} is not computed"):
        read_checkpoint(folder, "fp32")


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_a_scale_of_weights_is_refused_whatever_they_are_kept_in(folder: Path, suffix: str) -> None:
    change(folder, lambda tensors: tensors.update({f"{DOWN}{suffix}": torch.ones(1)}))
    with pytest.raises(UnsupportedModel, match=f"tensor {DOWN}{suffix} .*does not say"):
        read_checkpoint(folder, "fp32")


def test_packed_weights_are_refused_by_their_name(folder: Path) -> None:
    packed = DOWN.replace("weight", "qweight")
    change(folder, lambda tensors: tensors.update({packed: tensors.pop(DOWN)}))
    with pytest.raises(UnsupportedModel, match=f"tensor {packed} .*does not say"):
        read_checkpoint(folder, "fp32")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_full_numbers_of_any_width_are_read(folder: Path, dtype: torch.dtype) -> None:
    exact = read_checkpoint(folder, "fp32").weights.layers[1].down
    change(folder, lambda tensors: tensors.update({DOWN: tensors[DOWN].to(dtype)}))
    assert torch.equal(read_checkpoint(folder, "fp32").weights.layers[1].down, exact.to(dtype).float())


@pytest.mark.parametrize(
    "quantization", [{"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, {"quant_algo": "W4A16_AWQ"}, None]
)
def test_modelopts_own_record_of_quantised_weights_is_refused(
    folder: Path, quantization: dict[str, str] | None
) -> None:
    put(folder, "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": quantization})
    with pytest.raises(UnsupportedModel, match=r"hf_quant_config\.json"):
        read_checkpoint(folder, "fp32")


def test_modelopts_record_of_the_cache_alone_is_no_hindrance(folder: Path) -> None:
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    put(folder, "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": quantization})
    assert read_checkpoint(folder, "fp32").shape.num_layers == 2


def test_an_index_that_an_earlier_model_left_does_not_count(folder: Path) -> None:
    """save_pretrained removes the shards that it replaces with one file, and not their index."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model.save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").exists()
    head = read_checkpoint(folder, "fp32").weights.output_matrix()
    assert torch.equal(head, AutoModelForCausalLM.from_pretrained(folder).lm_head.weight)


def test_a_missing_head_is_not_the_embedding_unless_the_config_says_so(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(BadModelFile, match=r"tensor lm_head\.weight is missing"):
        read_checkpoint(folder, "fp32")
    put(folder, "config.json", {"tie_word_embeddings": True})
    assert read_checkpoint(folder, "fp32").weights.head is None


def test_a_head_beside_tied_embeddings_counts_where_it_differs_as_for_transformers(folder: Path) -> None:
    put(folder, "config.json", {"tie_word_embeddings": True})
    head = read_checkpoint(folder, "fp32").weights.output_matrix()
    assert torch.equal(head, AutoModelForCausalLM.from_pretrained(folder).lm_head.weight)
    change(folder, lambda tensors: tensors.update({HEAD: tensors["model.embed_tokens.weight"].clone()}))
    assert read_checkpoint(folder, "fp32").shape.tied_embeddings


def test_a_classifier_is_refused(folder: Path) -> None:
    LlamaForSequenceClassification(CONFIG).save_pretrained(folder)
    with pytest.raises(UnsupportedModel, match="architectures LlamaForSequenceClassification"):
        read_checkpoint(folder, "fp32")


def test_a_config_need_not_name_its_architecture(folder: Path) -> None:
    put(folder, "config.json", {"architectures": None})
    assert read_checkpoint(folder, "fp32").shape.family == "llama"


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_act", None), ("rms_norm_eps", "1e-5"), ("layer_types", ["full_attention"])],
)
def test_a_config_field_of_a_wrong_type_is_named(folder: Path, field: str, value: object) -> None:
    put(folder, "config.json", {field: value})
    with pytest.raises(UnsupportedModel, match=rf"config\.json cannot be read: [^$]*{field}"):
        read_checkpoint(folder, "fp32")


def test_attention_to_later_tokens_is_refused(folder: Path) -> None:
    put(folder, "config.json", {"is_causal": False})
    with pytest.raises(UnsupportedModel, match="is_causal"):
        read_checkpoint(folder, "fp32")
    put(folder, "config.json", {"is_causal": True})
    assert read_checkpoint(folder, "fp32").shape.family == "llama"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.2.input_layernorm.weight",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_a_tensor_that_the_config_does_not_speak_of_is_refused(folder: Path, name: str) -> None:
    change(folder, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(UnsupportedModel, match=f"tensor {name} is not computed"):
        read_checkpoint(folder, "fp32")


def test_more_layers_than_the_config_counts_are_refused(folder: Path) -> None:
    put(folder, "config.json", {"num_hidden_layers": 1})
    with pytest.raises(UnsupportedModel, match=r"tensor model\.layers\.1\..* is not computed"):
        read_checkpoint(folder, "fp32")


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "v_head.summary.bias"],
)
def test_tensors_that_the_computation_has_no_need_of_are_no_hindrance(folder: Path, name: str) -> None:
    change(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert read_checkpoint(folder, "fp32").shape.num_layers == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_file_that_is_written_over_changes_no_model_in_use(folder: Path, precision: Precision) -> None:
    """`cp new/model.safetensors served/` writes into the file that workers have mapped."""
    if precision != "fp32":
        change(folder, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    path = folder / "model.safetensors"
    weights = read_checkpoint(folder, precision).weights
    layer = weights.layers[0]
    kept = [
        one
        for one in (weights.embed, weights.final_norm, layer.o, layer.input_norm, layer.down)
        if isinstance(one, torch.Tensor)
    ]
    before = [one.clone() for one in kept]
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))
