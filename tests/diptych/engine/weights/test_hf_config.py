"""`config.json` read by our own code, against transformers' AutoConfig for every family."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig

from diptych.engine.models.registry import family_of
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.weights.hf_config import read_config, resolve_config, shape_from_config
from diptych.model_families import MODEL_TYPES
from tests.diptych.engine.models import published_experts, published_hybrids, published_recurrent
from tests.diptych.engine.models.published_configs import PUBLISHED as PUBLISHED_SINCE

LLAMA3_FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
LLAMAS = ("llama", "mistral", "ministral", "qwen2", "qwen3")
"""Families whose fields are Llama's."""
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**LLAMA3_FACTORS, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "eos_token_id": 2,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral",
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Mistral-7B-Instruct-v0.3": {
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "Ministral-8B-Instruct-2410": {
        "model_type": "mistral",
        "head_dim": 128,
        "intermediate_size": 12288,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 36,
        "rope_theta": 100000000.0,
        "sliding_window": 32768,
        "vocab_size": 131072,
    },
    "Qwen2.5-7B-Instruct, with YaRN as its card says": {
        "model_type": "qwen2",
        "eos_token_id": 151645,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
OTHERS = {
    **published_experts.PUBLISHED,
    **published_recurrent.PUBLISHED,
    **published_hybrids.PUBLISHED,
}
"""Published configs of models with experts or recurrent layers."""
ROPE_SPELLINGS: list[dict[str, Any]] = [
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3_FACTORS}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "truncate": False}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0.5}, "rope_parameters": None},
    {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "original_max_position_embeddings": 96,
    },
]
OTHER_FIELDS: list[dict[str, Any]] = [
    {"num_key_value_heads": 2},
    {"head_dim": 40},
    {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True, "eos_token_id": [1, 2]},
    {"eos_token_id": None},
    {"sliding_window": 17},
    {"sliding_window": None, "layer_types": MIXED},
    {"sliding_window": 17, "layer_types": MIXED},
    {"sliding_window": 17, "layer_types": ["attention"] * 3, "use_sliding_window": True},
    {"sliding_window": 17, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 17, "use_sliding_window": False, "max_window_layers": 1},
    {"use_sliding_window": True, "max_window_layers": 99},
]


def by_autoconfig(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    resolved: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    return resolved


def shape_of(resolved: dict[str, Any]) -> ModelShape:
    return shape_from_config(resolved, tied=resolved["tie_word_embeddings"])


def compare(config: dict[str, Any], folder: Path) -> None:
    """Compare shape and stop tokens; AutoConfig leaves no default open, so its side takes none of ours."""
    expected = by_autoconfig(config, folder)
    read = read_config(folder)
    assert shape_of(read) == shape_of(resolve_config(expected))
    assert read["eos_token_id"] == expected.get("eos_token_id")


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_every_default_is_that_of_transformers_class(family: str) -> None:
    theirs = CONFIG_MAPPING[family]
    ours = family_of(family)
    if ours.rope_by_layer_type is None:
        assert ours.rope_theta == theirs.default_theta
    neutral = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    for field, value in ours.defaults.items():
        assert getattr(theirs, field, neutral.get(field)) == value, field


# Whose defaults make no model: all layers recurrent, no number of experts a token, odd rotated lanes.
NO_MODEL = ("granitemoehybrid", "bamba", "lfm2_moe", "deepseek_v2", "glm4_moe")


@pytest.mark.parametrize("family", [name for name in MODEL_TYPES if name not in NO_MODEL])
def test_an_empty_config_gives_autoconfigs_shape(family: str, tmp_path: Path) -> None:
    compare({"model_type": family}, tmp_path)


@pytest.mark.parametrize("name", [*PUBLISHED, *PUBLISHED_SINCE, *OTHERS])
def test_published_configs_give_autoconfigs_shape(name: str, tmp_path: Path) -> None:
    compare({**PUBLISHED, **PUBLISHED_SINCE, **OTHERS}[name], tmp_path)


@pytest.mark.parametrize("name", published_recurrent.OTHER_NAMES)
def test_second_names_of_fields_are_read(name: str, tmp_path: Path) -> None:
    compare(published_recurrent.OTHER_NAMES[name], tmp_path)


@pytest.mark.parametrize("family", LLAMAS)
@pytest.mark.parametrize("fields", ROPE_SPELLINGS)
def test_both_spellings_of_rope_give_autoconfigs_shape(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    compare({"model_type": family, **SMALL, **fields}, tmp_path)


@pytest.mark.parametrize("family", LLAMAS)
@pytest.mark.parametrize("fields", OTHER_FIELDS)
def test_fields_of_heads_windows_and_tokens_give_autoconfigs_shape(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    compare({"model_type": family, **SMALL, **fields}, tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 131.0}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"hidden_size": 100}, "hidden_size"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_fields_that_autoconfig_refuses_are_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises((StrictDataclassError, KeyError)):
        by_autoconfig({"model_type": "llama", **SMALL, **fields}, tmp_path)
    with pytest.raises(UnsupportedModel, match=named):
        shape_of(read_config(tmp_path))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types: linear_attention"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters by layer type"),
        ({"rope_theta": None}, "rope_parameters"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "rope_parameters"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_models_that_are_not_computed_are_refused_by_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        shape_of(resolve_config({"model_type": "llama", **SMALL, **fields}))


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_a_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UnsupportedModel, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_a_folder_is_read_where_transformers_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-0.6B"]))
    program = (
        "import sys; sys.modules.update(transformers=None, triton=None)\n"
        "from pathlib import Path\n"
        "import diptych.engine.loaded_model\n"
        "from diptych.engine.weights.safetensors_folder import read_config\n"
        "print(read_config(Path(sys.argv[1]))['num_hidden_layers'])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.stdout == "28\n", ran.stderr
