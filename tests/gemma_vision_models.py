"""A tiny random Gemma 3 with images, as transformers makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from tests.diptych.runtime.tokenizer.small_models import byte_level
from tests.qwen_vision_models import shaken

_TOKENS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
_NAMED = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
    "{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_ROWS, _EDGE = 9, 36


def write(folder: Path) -> Path:
    """Write a model with tokenizer, chat template and processor; return the folder."""
    tokenizer = byte_level(vocab_size=700)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _TOKENS])
    end = tokenizer.token_to_id("<end_of_turn>")
    text = Gemma3TextConfig(
        vocab_size=tokenizer.get_vocab_size() + 3,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        query_pre_attn_scalar=12,
        max_position_embeddings=1024,
        initializer_range=0.2,
        sliding_window=7,  # less than an image has rows
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=end,
        pad_token_id=0,
    )
    vision = SiglipVisionConfig(
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=5,
        image_size=_EDGE,
        patch_size=6,
        vision_use_head=False,
    )
    torch.manual_seed(8)
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=_ROWS,
        tie_word_embeddings=False,  # tied, a random model repeats its last token
        boi_token_index=tokenizer.token_to_id("<start_of_image>"),
        eoi_token_index=tokenizer.token_to_id("<end_of_image>"),
        image_token_index=tokenizer.token_to_id("<image_soft_token>"),
    )
    model = shaken(Gemma3ForConditionalGeneration(config))
    with torch.no_grad():
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.3)
        model.model.language_model.embed_tokens.weight *= 0.3  # else a token outweighs all images before it
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<end_of_turn>",
        pad_token="<s>",
        chat_template=_TEMPLATE,
        extra_special_tokens=_NAMED,
    ).save_pretrained(folder)
    _pillow().save_pretrained(folder)
    return folder


def _pillow() -> Any:
    return Gemma3ImageProcessorPil(size={"height": _EDGE, "width": _EDGE})


def oracle(folder: Path) -> Any:
    """Return transformers' model, in float32."""
    return Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def processor(folder: Path) -> Any:
    """Return transformers' processor with Pillow."""
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    return Gemma3Processor(_pillow(), fast, chat_template=_TEMPLATE, image_seq_length=_ROWS)
