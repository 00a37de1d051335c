"""Tiny random models with images, as transformers makes them, and pictures of odd sizes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.processing_llava import LlavaProcessor

from tests import gemma_vision_models, qwen_vision_models
from tests.diptych.runtime.tokenizer.small_models import byte_level

FAMILIES = ("idefics3", "llava", "qwen2_5_vl", "gemma3")
CONTEXT = 1024
PIXELS = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
INPUTS = ("input_ids", "mm_token_type_ids", "token_type_ids", *PIXELS)
"""Outputs of transformers' processors that its models read."""
IDEFICS3_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
IDEFICS3_TEMPLATE = (
    "<s>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA_TEMPLATE = (
    "<s>{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
    "{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def write(family: str, folder: Path) -> Path:
    """Write a model of `family` with tokenizer, chat template and processor; return the folder."""
    if family in qwen_vision_models.FAMILIES:
        return qwen_vision_models.write(family, folder)
    if family == "gemma3":
        return gemma_vision_models.write(folder)
    if family == "idefics3":
        return _write_idefics3(folder)
    return _write_llava(folder, Qwen2Config if family == "llava_qwen2" else LlamaConfig)


def inputs_of(processor: Any, family: str, text: str, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """Return transformers' inputs of a rendered conversation about pictures."""
    images = [list(pictures)] if family in ("idefics3", "gemma3") else list(pictures)
    given = {"images": images} if pictures else {}
    found = processor(text=[text], return_tensors="pt", add_special_tokens=False, **given)
    return {name: found[name] for name in INPUTS if name in found}


def _text(vocabulary: int, kind: Callable[..., Any] = LlamaConfig, **more: Any) -> Any:
    return kind(
        vocab_size=vocabulary,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=more["bos_token_id"],
        eos_token_id=more["eos_token_id"],
        pad_token_id=0,
    )


def _tokens(added: Sequence[str]) -> Tokenizer:
    tokenizer = byte_level(vocab_size=700)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in added])
    return tokenizer


def _save(folder: Path, tokenizer: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<s>", chat_template=template
    )
    fast.save_pretrained(folder)
    return fast


def _write_idefics3(folder: Path) -> Path:
    tokenizer = _tokens(IDEFICS3_TOKENS)
    torch.manual_seed(5)
    config = Idefics3Config(
        vision_config={
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 5,
            "image_size": 36,
            "patch_size": 6,
            "initializer_range": 0.2,
        },
        text_config=_text(
            tokenizer.get_vocab_size() + 3,
            bos_token_id=tokenizer.token_to_id("<s>"),
            eos_token_id=tokenizer.token_to_id("<end_of_utterance>"),
        ).to_dict(),
        scale_factor=2,
        image_token_id=tokenizer.token_to_id("<image>"),
    )
    qwen_vision_models.shaken(Idefics3ForConditionalGeneration(config)).save_pretrained(folder)
    fast = _save(folder, tokenizer, IDEFICS3_TEMPLATE)
    processor = Idefics3ImageProcessorPil(size={"longest_edge": 108}, max_image_size={"longest_edge": 36})
    Idefics3Processor(processor, fast, image_seq_len=9, chat_template=IDEFICS3_TEMPLATE).save_pretrained(
        folder
    )
    return folder


def _write_llava(folder: Path, text: Callable[..., Any]) -> Path:
    tokenizer = _tokens(("<image>",))
    torch.manual_seed(6)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=40,
            intermediate_size=56,
            num_hidden_layers=4,
            num_attention_heads=5,
            image_size=35,
            patch_size=7,
            initializer_range=0.2,
        ),
        text_config=_text(
            tokenizer.get_vocab_size() + 3,
            text,
            bos_token_id=tokenizer.token_to_id("<s>"),
            eos_token_id=tokenizer.token_to_id("</s>"),
        ),
        image_token_index=tokenizer.token_to_id("<image>"),
        image_seq_length=25,
    )
    qwen_vision_models.shaken(LlavaForConditionalGeneration(config)).save_pretrained(folder)
    fast = _save(folder, tokenizer, LLAVA_TEMPLATE)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 35}, crop_size={"height": 35, "width": 35})
    LlavaProcessor(
        processor,
        fast,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def oracle(family: str, folder: Path) -> Any:
    """Return transformers' model, in float32."""
    if family in qwen_vision_models.FAMILIES:
        return qwen_vision_models.oracle(family, folder)
    if family == "gemma3":
        return gemma_vision_models.oracle(folder)
    kind = Idefics3ForConditionalGeneration if family == "idefics3" else LlavaForConditionalGeneration
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def processor(family: str, folder: Path) -> Any:
    """Return transformers' processor with Pillow."""
    if family in qwen_vision_models.FAMILIES:
        return qwen_vision_models.processor(folder)
    if family == "gemma3":
        return gemma_vision_models.processor(folder)
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    saved = json.loads((folder / "processor_config.json").read_bytes())
    fields = {key: value for key, value in saved["image_processor"].items() if key != "image_processor_type"}
    if family == "idefics3":
        return Idefics3Processor(
            Idefics3ImageProcessorPil(**fields), fast, image_seq_len=9, chat_template=IDEFICS3_TEMPLATE
        )
    return LlavaProcessor(
        CLIPImageProcessorPil(**fields),
        fast,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Return a picture of noise over a slope, so that neither blur nor shift leaves it as it is."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    slope = np.linspace(0, 255, width)[None, :, None]
    return Image.fromarray(((noise + slope) / 2).astype(np.uint8))


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the file of a picture."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rewrite(path: Path, members: dict[str, Any]) -> None:
    """Replace members of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **members}))
