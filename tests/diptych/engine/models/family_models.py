"""Tiny random models of every dense family, as transformers computes them, and our steps over them."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.loaded_model import Model
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Checkpoint, LayerWeights
from diptych.engine.weights.canonical import layer_shapes

VOCABULARY, TEXT, BLOCK = 131, 97, 16
"""Words of each model, tokens of a text (more than any window), tokens of a block."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
WIDE: dict[str, Any] = {"head_dim": 40}
"""A head whose width is not the hidden size's share."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_FULL, _SLIDING = "full_attention", "sliding_attention"


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    """Return rotary fields with factors for `pairs` pairs of lanes, trained on 32 tokens."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.4 * pair for pair in range(pairs)],
        **more,
    }


GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
GRANITE4 = {
    **GRANITE,
    "layer_types": ["attention"] * 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 150,
    "mamba_n_heads": 12,
}
GEMMA2 = {**WIDE, "sliding_window": 19, "query_pre_attn_scalar": 17}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", WIDE),
    "gemma2": ("gemma2", {**GEMMA2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA2, "sliding_window_pattern": 3}),
    "gemma3-linear": (
        "gemma3_text",
        {
            **GEMMA2,
            "layer_types": HYBRID,
            "rope_parameters": {_FULL: {**LINEAR, "rope_theta": 1e6}, _SLIDING: PLAIN},
        },
    ),
    "phi3": ("phi3", {"sliding_window": 19}),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": 32, "rope_parameters": longrope(8), "tie_word_embeddings": True},
    ),
    "phi3-partial": (
        "phi3",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 32,
            "rope_parameters": longrope(12, partial_rotary_factor=0.75),
        },
    ),
    "granite": ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite-tied": ("granite", {**GRANITE, "tie_word_embeddings": True}),
    "granite4": ("granitemoehybrid", {**GRANITE4, "position_embedding_type": "rope"}),
    "granite4-nope": ("granitemoehybrid", GRANITE4),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 19},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 19,
            "layer_types": HYBRID,
            "rope_parameters": {_FULL: YARN, _SLIDING: PLAIN},
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 19, "sliding_window_pattern": 2, "rope_parameters": LLAMA3}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": [_FULL] * 4}),
    "glm": ("glm", WIDE),
    "glm4": ("glm4", WIDE),
    "glm4-quarter": (
        "glm4",
        {**WIDE, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}, "attention_bias": False},
    ),
    "cohere": ("cohere", {"attention_bias": True}),
    "cohere2": ("cohere2", {"sliding_window": 19, "layer_types": HYBRID}),
    "starcoder2": ("starcoder2", {"sliding_window": 19}),
    "starcoder2-unbiased": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    ),
    "nemotron": ("nemotron", WIDE),
    "arcee": ("arcee", {"mlp_bias": True}),
    "seed-oss": ("seed_oss", {**WIDE, "attention_out_bias": True}),
    "ernie4.5": ("ernie4_5", {**WIDE, "use_bias": True}),
    "helium": ("helium", {"head_dim": 16}),
    "cwm": ("cwm", {**WIDE, "sliding_window": 19, "rope_parameters": LLAMA3}),
    "hunyuan": ("hunyuan_v1_dense", {**WIDE, "rope_parameters": PLAIN}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {**WIDE, "rope_parameters": {**PLAIN, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "internlm3": ("internlm3", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "internlm3-dynamic": (
        "internlm3",
        {**WIDE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0}},
    ),
    "ministral3": (
        "ministral3",
        {
            **WIDE,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 20,
            },
        },
    ),
}
"""For each case the `model_type`, and fields of its config beside `SIZES`."""


def config_of(name: str) -> Any:
    """Return transformers' config of a case."""
    model_type, fields = CASES[name]
    return CONFIG_MAPPING[model_type](**{**SIZES, **fields})


def oracle_of(config: Any, seed: int = 11) -> Any:
    """Return transformers' random model of `config`, in float32, computed as its own file says."""
    torch.manual_seed(seed)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    randomise(oracle)
    return oracle


def randomise(oracle: Any) -> None:
    """Fill a model with numbers that show what is left out: fresh norms are ones, and biases zeros.

    Norms are about one, as in trained models, also where they are stored less one.
    """
    about = 0.0 if oracle.config.model_type.startswith(("gemma", "nemotron")) else 1.0
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            scale = 0.5 if name.endswith("bias") or "norm" in name else 0.15
            parameter.normal_(about if "norm" in name else 0.0, scale)


def text_of(length: int, seed: int = 5) -> list[int]:
    """Return random token ids."""
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(oracle: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits after each token, `[tokens, vocab]`."""
    with torch.no_grad():
        return oracle(torch.tensor([list(ids)]), use_cache=False).logits[0].float()


class Stepper:
    """Steps of one backend over shuffled blocks of which every unwritten number is NaN."""

    def __init__(
        self,
        backend: Any,
        shape: ModelShape,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self._layout = kv_layout(shape, dtype, BLOCK)
        self._backend, blocks = backend, 240 * self._layout.blocks_per_place
        on_host = device is None or device.type == "cpu"
        self._memory = (
            KVMemory(self._layout, blocks) if on_host else KVMemory.on_device(self._layout, blocks, device)  # type: ignore[arg-type]
        )
        self._memory.data.fill_(torch.nan)
        self._free = list(range(blocks))
        random.Random(3).shuffle(self._free)

    def tables(self, tokens: int) -> list[list[int]]:
        """Return fresh blocks for so many tokens: keys and values, then each of the pages of states."""
        places = -(-tokens // BLOCK)
        return [[self._free.pop() for _ in range(places)] for _ in range(self._layout.blocks_per_place)]

    def step(self, tables: list[list[int]], start: int, ids: list[int], **wants: Any) -> SequenceStep:
        """Return a sequence's share of a step."""
        full, *pages = tables
        return SequenceStep(self._memory, full, start, ids, window_tables=tuple(map(tuple, pages)), **wants)

    def logits(self, ids: Sequence[int], chunk: int) -> torch.Tensor:
        """Return the logits after each token of a text that comes in chunks, `[tokens, vocab]`."""
        tables, rows = self.tables(len(ids)), []
        for start in range(0, len(ids), chunk):
            part = list(ids[start : start + chunk])
            step = self.step(tables, start, part, wants_logits=True, trailing=len(part))
            rows.append(self._backend.forward([step], None))
        return torch.cat(rows)

    def greedy(
        self, prompts: Sequence[Sequence[int]], count: int, slots: Sequence[int | None] | None = None
    ) -> list[list[int]]:
        """Return each prompt with `count` greedy tokens: prompts begin one step after another, in chunks of
        several sizes, beside those that decode already. `slots` are those of their adapters.
        """
        slots = [None] * len(prompts) if slots is None else slots
        texts = [list(prompt) for prompt in prompts]
        tables = [self.tables(len(prompt) + count) for prompt in prompts]
        done = [0] * len(texts)
        begun = 0
        while any(len(text) < len(prompt) + count for text, prompt in zip(texts, prompts, strict=True)):
            begun = min(begun + 1, len(texts))
            wanted = [i for i in range(begun) if len(texts[i]) < len(prompts[i]) + count]
            steps = []
            for i in wanted:
                part = texts[i][done[i] : done[i] + 11 + i]
                ends = done[i] + len(part) == len(texts[i])
                steps.append(self.step(tables[i], done[i], part, wants_logits=ends, adapter=slots[i]))
                done[i] += len(part)
            tokens = iter(self._backend.forward(steps, None).argmax(dim=-1).tolist())
            for i, step in zip(wanted, steps, strict=True):
                if step.wants_logits:
                    texts[i].append(next(tokens))
        return texts


def check_greedy(oracle: Any, backend: Any, shape: ModelShape, tokens: int, texts: int) -> None:
    """Compare a backend's greedy tokens of so many texts, alone and mixed, with transformers'.

    By induction: each token is the likeliest after those before it, as transformers has them.
    """
    prompts = [text_of(40 + 3 * number, seed=number) for number in range(texts)]
    [alone] = Stepper(backend, shape).greedy(prompts[:1], tokens)
    mixed = Stepper(backend, shape).greedy(prompts, tokens)
    assert mixed[0] == alone
    for prompt, text in zip(prompts, mixed, strict=True):
        likeliest = oracle_logits(oracle, text).argmax(dim=-1).tolist()
        assert likeliest[len(prompt) - 1 : -1] == text[len(prompt) :]


def check_bfloat16(oracle: Any, model: Model) -> None:
    """Compare a bfloat16 model's logits with float32's: they are as near as transformers' in bfloat16.

    Most tokens count, not all: one whose choice of experts rounding turns, which it does in both, is far off.
    """
    exact = oracle_logits(oracle, text_of(TEXT))
    got = Stepper(model.backend, model.shape, torch.bfloat16).logits(text_of(TEXT), TEXT)
    peer = oracle_logits(copy.deepcopy(oracle).bfloat16(), text_of(TEXT))
    ours, theirs = ((one - exact).norm(dim=1).median() for one in (got, peer))
    assert ours < 1.25 * theirs


def spoiled(checkpoint: Checkpoint, **changes: Any) -> torch.Tensor:
    """Return the torch backend's logits of a text with some switches changed, `[tokens, vocab]`.

    Tensors that the changed shape has not are left out; a norm that it has anew is the one that was on the
    sublayer's other side.
    """
    shape = replace(checkpoint.shape, **changes)
    layers = tuple(
        _fitting(layer, dict(layer_shapes(shape, index)))
        for index, layer in enumerate(checkpoint.weights.layers)
    )
    backend = TorchBackend(shape, replace(checkpoint.weights, layers=layers))
    return Stepper(backend, shape).logits(text_of(TEXT), TEXT)


_IN_ITS_PLACE = {
    "input_norm": ("attention_out_norm",),
    "post_norm": ("feed_forward_out_norm", "input_norm"),
    "post_norm_bias": ("input_norm_bias",),
    "attention_out_norm": ("input_norm",),
    "feed_forward_out_norm": ("post_norm",),
    "gate": ("up",),
    "gate_bias": ("up_bias",),
}


def _fitting(layer: LayerWeights, sizes: Mapping[str, tuple[int, ...]]) -> LayerWeights:
    given = {name: tensor for name, tensor in vars(layer).items() if tensor is not None}
    made = {}
    for name, size in sizes.items():
        places = (name, *_IN_ITS_PLACE.get(name, ()))
        found = next(given[place] for place in places if place in given)
        made[name] = found if tuple(found.shape) == size else found[: size[0]]
    return LayerWeights(**made)


def save(oracle: Any, folder: Path) -> Path:
    """Save a model and return its folder."""
    oracle.save_pretrained(folder)
    return folder
