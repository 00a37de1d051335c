"""Tiny random models of Qwen-VL, as transformers makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from tests.diptych.runtime.tokenizer.small_models import byte_level

FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl")
_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PATCH, _MERGE = 6, 2
_VISION = {"depth": 3, "num_heads": 5, "patch_size": _PATCH, "out_hidden_size": 72, "initializer_range": 0.2}
_KINDS: dict[str, Any] = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}


def _vision(family: str) -> dict[str, Any]:
    if family == "qwen2_vl":
        return {**_VISION, "embed_dim": 40, "mlp_ratio": 2, "hidden_size": 72}
    if family == "qwen3_vl":
        deep = {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
        return {**_VISION, "hidden_size": 40, "intermediate_size": 56, **deep}
    return {
        **_VISION,
        "hidden_size": 40,
        "intermediate_size": 56,
        "window_size": 24,
        "fullatt_block_indexes": [1],
    }


def write(family: str, folder: Path) -> Path:
    """Write a model of `family` with tokenizer, chat template and processor; return the folder."""
    tokenizer = byte_level(vocab_size=700)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _TOKENS])
    end = tokenizer.token_to_id("<|im_end|>")
    text: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size() + 3,
        "hidden_size": 72,
        "intermediate_size": 104,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": end,
        "eos_token_id": end,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 1, 3]},
    }
    if family == "qwen3_vl":
        text["head_dim"] = 12
        text["rope_parameters"]["mrope_section"] = [2, 2, 2]
    torch.manual_seed(7)
    kind, model = _KINDS[family]
    config = kind(
        text_config=text,
        vision_config=_vision(family),
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
        eos_token_id=end,
    )
    shaken(model(config)).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=_TEMPLATE
    )
    fast.save_pretrained(folder)
    _pillow().save_pretrained(folder)
    return folder


def shaken(model: Any) -> Any:
    """Give biases and norms values that no reader may leave out."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                value += 0.3 * torch.randn_like(value)
            elif any(part in name for part in ("vision", "visual", "connector", "projector")):
                value += 0.15 * torch.randn_like(value)
    return model


def _pillow() -> Any:
    square = (_PATCH * _MERGE) ** 2
    return Qwen2VLImageProcessorPil(
        patch_size=_PATCH, merge_size=_MERGE, size={"shortest_edge": 4 * square, "longest_edge": 40 * square}
    )


def oracle(family: str, folder: Path) -> Any:
    """Return transformers' model, in float32."""
    return _KINDS[family][1].from_pretrained(folder, dtype=torch.float32).eval()


def processor(folder: Path) -> Any:
    """Return transformers' processor with Pillow, without videos."""
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    return _ImagesOnly(_pillow(), fast, None, chat_template=_TEMPLATE)


class _ImagesOnly(Qwen2VLProcessor):
    """Is transformers' processor without that of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Accept no processor of videos."""
        if argument is not None:
            return super().check_argument_for_proper_class(argument_name, argument)
        return None
