"""Table of the model families: the names in model files, and the module of the engine that reads each.

The gateway and the launcher refuse by this table what is not computed, before anything is loaded; the engine
finds its readers by it (diptych/engine/models/registry.py). Data and plain functions: imports nothing of
Diptych.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

MODEL_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "mistral",
        "ministral": "mistral",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "arcee": "nemotron",
        "cohere": "cohere",
        "cohere2": "cohere",
        "cwm": "cwm",
        "ernie4_5": "ernie4_5",
        "exaone4": "exaone4",
        "gemma": "gemma",
        "gemma2": "gemma",
        "gemma3_text": "gemma",
        "glm": "glm4",
        "glm4": "glm4",
        "granite": "granite",
        "granitemoehybrid": "granite",
        "helium": "helium",
        "hunyuan_v1_dense": "hunyuan",
        "internlm3": "internlm3",
        "lfm2": "lfm2",
        "lfm2_moe": "lfm2_moe",
        "bamba": "bamba",
        "falcon_h1": "falcon_h1",
        "jamba": "jamba",
        "nemotron_h": "nemotron_h",
        "ministral3": "ministral3",
        "nemotron": "nemotron",
        "olmo2": "olmo2",
        "olmo3": "olmo2",
        "phi3": "phi3",
        "seed_oss": "seed_oss",
        "smollm3": "smollm3",
        "stablelm": "stablelm",
        "starcoder2": "starcoder2",
        "deepseek_v2": "deepseek",
        "deepseek_v3": "deepseek",
        "glm4_moe": "glm4_moe",
        "gpt_oss": "gpt_oss",
        "granitemoe": "granite_moe",
        "mixtral": "mixtral",
        "olmoe": "olmoe",
        "qwen2_moe": "qwen3_moe",
        "qwen3_next": "qwen3_next",
        "qwen3_5_text": "qwen3_5",
        "qwen3_5_moe_text": "qwen3_5",
        "qwen3_moe": "qwen3_moe",
        "qwen2_vl_text": "qwen_vl",
        "qwen2_5_vl_text": "qwen_vl",
        "qwen3_vl_text": "qwen_vl",
    }
)
"""`model_type` of a config.json, and the module in diptych/engine/models whose `FAMILIES` have it."""

GGUF_ARCHITECTURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "mistral",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "arcee": "nemotron",
        "cohere2": "cohere",
        "command-r": "cohere",
        "ernie4_5": "ernie4_5",
        "exaone4": "exaone4",
        "gemma": "gemma",
        "gemma2": "gemma",
        "gemma3": "gemma",
        "glm4": "glm4",
        "granite": "granite",
        "hunyuan-dense": "hunyuan",
        "lfm2": "lfm2",
        "mistral3": "ministral3",
        "nemotron": "nemotron",
        "olmo2": "olmo2",
        "phi3": "phi3",
        "seed_oss": "seed_oss",
        "smollm3": "smollm3",
        "stablelm": "stablelm",
        "starcoder2": "starcoder2",
        "deepseek2": "deepseek",
        "glm4moe": "glm4_moe",
        "gpt-oss": "gpt_oss",
        "granitemoe": "granite_moe",
        "olmoe": "olmoe",
        "qwen2moe": "qwen3_moe",
        "qwen2vl": "qwen_vl",
        "qwen3vl": "qwen_vl",
        "qwen3moe": "qwen3_moe",
    }
)
"""`general.architecture` of a GGUF file, and the module whose `GGUF_FAMILIES` have it."""

WRAPPERS: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        (
            *("gemma3", "mistral3", "idefics3", "smolvlm", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
            *("qwen3_5", "qwen3_5_moe"),
        ),
        "text_config",
    )
)
"""`model_type` of a model with images around a text model, and the config's key of the latter."""

_FLAT: Final = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Wrappers whose older files have the text model's fields beside the encoder's."""

DEFAULTS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "llama": (32_000, 2_048),
        "mistral": (32_000, 131_072),
        "ministral": (32_000, 131_072),
        "qwen2": (151_936, 32_768),
        "qwen3": (151_936, 32_768),
        "arcee": (32_000, 4_096),
        "cohere": (256_000, 8_192),
        "cohere2": (256_000, 8_192),
        "cwm": (128_256, 131_072),
        "ernie4_5": (103_424, 131_072),
        "exaone4": (102_400, 2_048),
        "gemma": (256_000, 8_192),
        "gemma2": (256_000, 8_192),
        "gemma3_text": (262_208, 131_072),
        "glm": (151_552, 131_072),
        "glm4": (151_552, 131_072),
        "granite": (32_000, 2_048),
        "granitemoehybrid": (32_000, 2_048),
        "helium": (48_000, 4_096),
        "hunyuan_v1_dense": (290_943, 2_048),
        "internlm3": (128_512, 32_768),
        "lfm2": (65_536, 128_000),
        "lfm2_moe": (65_536, 128_000),
        "bamba": (128_000, 262_144),
        "falcon_h1": (128_000, 8_192),
        "jamba": (65_536, 262_144),
        "nemotron_h": (131_072, 4_096),
        "ministral3": (131_072, 262_144),
        "nemotron": (256_000, 4_096),
        "olmo2": (50_304, 2_048),
        "olmo3": (50_304, 2_048),
        "phi3": (32_064, 4_096),
        "seed_oss": (155_136, 524_288),
        "smollm3": (128_256, 32_768),
        "stablelm": (50_304, 4_096),
        "starcoder2": (49_152, 4_096),
        "deepseek_v2": (102_400, 2_048),
        "deepseek_v3": (129_280, 4_096),
        "glm4_moe": (151_552, 131_072),
        "gpt_oss": (201_088, 131_072),
        "granitemoe": (32_000, 2_048),
        "mixtral": (32_000, 131_072),
        "olmoe": (50_304, 4_096),
        "qwen2_moe": (151_936, 32_768),
        "qwen3_next": (151_936, 32_768),
        "qwen3_5_text": (248_320, 32_768),
        "qwen3_5_moe_text": (248_320, 32_768),
        "qwen3_moe": (151_936, 32_768),
        "qwen2_vl_text": (152_064, 32_768),
        "qwen2_5_vl_text": (152_064, 32_768),
        "qwen3_vl_text": (151_936, 128_000),
    }
)
"""`vocab_size` and `max_position_embeddings` of configs that leave them out, by `model_type`."""

OWN_CODE: Final = frozenset(
    {
        *("exaone4", "glm", "glm4", "granite", "helium", "hunyuan_v1_dense", "internlm3", "ministral3"),
        *("olmo2", "phi3", "seed_oss", "smollm3", "stablelm", "starcoder2", "ernie4_5"),
        *("deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "olmoe"),
    }
)
"""Types whose published folders name code of their own in `auto_map`, though transformers has them: they are
computed as transformers computes them without it.
"""

_IMAGES: Final = "its positions or its images are of a form that is not computed"
_RECURRENT: Final = (
    "its layers keep a recurrent state of a kind that is not computed, or none of them attends"
)
_FOLDERS_ONLY: Final = "models with recurrent layers are read of Hugging Face folders, not of GGUF files"
NOT_COMPUTED: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        (
            *("falcon_mamba", "kimi_linear", "mamba", "mamba2", "minimax", "olmo_hybrid"),
            *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
            *("kimi-linear", "plamo2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
        ),
        _RECURRENT,
    )
    | dict.fromkeys(
        (
            *("falcon-h1", "granitehybrid", "lfm2moe", "nemotron_h_moe"),
            *("qwen35", "qwen35moe", "qwen3next"),
        ),
        _FOLDERS_ONLY,
    )
    | dict.fromkeys(
        (
            *("qwen3_vl_moe", "mllama", "llava_next", "llava_onevision"),
            *("paligemma", "idefics2", "internvl", "gemma3n", "kimi_vl", "glm4v", "glm4v_moe", "llama4"),
        ),
        _IMAGES,
    )
)
"""Names of either table's kind that are known and refused, and why."""


def wrapped_text(config: Mapping[str, Any]) -> object:
    """Return the fields of a wrapper's text model as they stand in its config; of no use if no mapping."""
    kind = str(config.get("model_type"))
    inner = config.get(WRAPPERS[kind])
    if inner is None and kind in _FLAT:
        left_out = ("vision_config", "architectures")
        inner = {name: value for name, value in config.items() if name not in left_out}
        inner["model_type"] = f"{kind}_text"
    return inner


def text_model(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of the text model, with the defaults of its vocabulary and context filled in: that
    inside a wrapper, with what stands beside it, any other as it is; None for a wrapper without one.
    """
    key = WRAPPERS.get(str(config.get("model_type")))
    text = dict(config)
    if key is not None:
        inner = wrapped_text(config)
        if not isinstance(inner, dict):
            return None
        beside = ("eos_token_id", "quantization_config", "compression_config")
        outer = {name: config[name] for name in beside if config.get(name) is not None}
        tied = config.get("tie_word_embeddings", True)
        text = {**inner, **outer, "tie_word_embeddings": tied, "architectures": None}
    defaults = DEFAULTS.get(str(text.get("model_type")))
    if defaults is None:
        return text
    return {**dict(zip(("vocab_size", "max_position_embeddings"), defaults, strict=True)), **text}
