"""Table of the model families: the names in model files, and the module of the engine that reads each.

The gateway and the launcher refuse by this table what is not computed, before anything is loaded; the engine
finds its readers by it (diptych/engine/models/registry.py). Plain data: imports nothing of Diptych.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

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
        "qwen3_moe": "qwen3_moe",
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
        "qwen3moe": "qwen3_moe",
    }
)
"""`general.architecture` of a GGUF file, and the module whose `GGUF_FAMILIES` have it."""

WRAPPERS: Final[Mapping[str, str]] = MappingProxyType({"gemma3": "text_config", "mistral3": "text_config"})
"""`model_type` of a model with images around a text model, and the config's key of the latter."""

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

_RECURRENT: Final = "its layers keep a recurrent state, which is not stored beside keys and values"
NOT_COMPUTED: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        (
            *("bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"),
            *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
            *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
            *("falcon-h1", "kimi-linear", "lfm2moe", "nemotron_h_moe", "plamo2", "qwen35", "qwen35moe"),
            *("qwen3next", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
        ),
        _RECURRENT,
    )
)
"""Names of either table's kind that are known and refused, and why."""
