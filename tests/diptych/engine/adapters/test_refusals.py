"""Adapters that are not computed: each is refused by the name of what is at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.engine.adapters.adapter import BadAdapter
from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backends.lacks import lacks_adapters
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import BatchError, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model
from diptych.engine.models.shape import LatentShape
from diptych.engine.runner import Runner
from tests.diptych.engine.adapters.test_adapters import SHAPE, write_for_shape
from tests.kernels.cpu.tiny_models import layout_of, shape_of, weights_of

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
Q_A, Q_B = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora: DoRA is not computed"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: "),
        ({"bias": "all"}, "bias: "),
        ({"peft_type": "IA3"}, "peft_type: 'IA3'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: "),
        ({"lora_bias": True}, "lora_bias: "),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters: adapters of experts"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: "),
        ({"layer_replication": [[0, 2]]}, "layer_replication: "),
        ({"new_method": {"x": 1}}, "new_method: "),
        ({"r": 0}, "r: 0 is no rank"),
        ({"r": True}, "r: True is no rank"),
        ({"lora_alpha": "much"}, "lora_alpha: 'much' is no number"),
        ({"rank_pattern": [4]}, "rank_pattern: must be an object"),
        ({"target_modules": []}, "target_modules: is empty"),
        ({"target_modules": ["q_proj", "query"]}, "target_modules: 'query' matches no module of this model"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: 'lm_head' cannot be adapted here"),
        ({"target_modules": "(q_proj"}, "target_modules: '\\(q_proj' is no regular expression"),
        ({"target_modules": "nothing"}, "target_modules: 'nothing' matches no module"),
        ({"target_modules": ["k_proj"]}, "q_proj.lora_A.weight: target_modules does not name its module"),
        ({"layers_to_transform": [1]}, "layers.0.self_attn.q_proj.lora_A.weight: target_modules does not"),
        ({"rank_pattern": {"q_proj": 2}}, "q_proj: A has 4 rows, its rank is 2"),
    ],
    ids=str,
)
def test_fields_are_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_for_shape(tmp_path / "adapter", 1, targets=["q_proj", "k_proj"], **fields)
    with pytest.raises(BadAdapter, match=message):
        read_adapter(folder, SHAPE, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q_A: None}, f"tensor {Q_A.removeprefix('base_model.model.')} is missing"),
        ({Q_A: None, Q_B: None}, "layers.0.self_attn.q_proj.lora_A.weight is missing"),
        ({Q_A: torch.ones(4, 99)}, "q_proj: A is \\(4, 99\\), the model needs \\(4, 100\\)"),
        ({Q_B: torch.ones(239, 4)}, "q_proj: B is \\(239, 4\\), the model needs \\(240, 4\\)"),
        ({Q_A: torch.full((4, 100), torch.nan)}, "has numbers that are not finite"),
        ({Q_A: torch.ones(4, 100, dtype=torch.int32)}, "is of type torch.int32"),
        ({Q_A: torch.ones(400)}, "is no matrix"),
        ({f"{MODULE}.lora_magnitude_vector": torch.ones(240)}, "DoRA is not computed"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 100)}, "adapters of the output matrix"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 131)}, "of embeddings"),
        (
            {"base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight": torch.ones(4, 100)},
            "adapters of experts are not computed",
        ),
        ({f"{MODULE.replace('.0.', '.7.')}.lora_A.weight": torch.ones(4, 100)}, "has no such module"),
        ({"base_model.model.model.norm.weight": torch.ones(100)}, "it is neither A nor B"),
    ],
    ids=str,
)
def test_tensors_are_refused_by_name(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    folder = write_for_shape(tmp_path / "adapter", 1, targets=["q_proj"])
    tensors: dict[str, Any] = {**load_file(folder / "adapter_model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "adapter_model.safetensors")
    with pytest.raises(BadAdapter, match=message):
        read_adapter(folder, SHAPE, 64)


def test_ranks_above_the_limit_are_refused(tmp_path: Path) -> None:
    folder = write_for_shape(tmp_path / "adapter", 1, rank=9)
    assert read_adapter(folder, SHAPE, 9).rank == 9
    with pytest.raises(BadAdapter, match="rank 9, and --max-lora-rank is 8"):
        read_adapter(folder, SHAPE, 8)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    folder = write_for_shape(tmp_path / "adapter", 1)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(BadAdapter, match=r"adapter_config\.json is no object"):
        read_adapter(folder, SHAPE, 64)
    folder = write_for_shape(tmp_path / "adapter", 1)
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadAdapter, match=r"adapter_model\.safetensors: "):
        read_adapter(folder, SHAPE, 64)


def test_attention_over_latents_is_said_to_have_no_adapters(tmp_path: Path) -> None:
    shape = shape_of(latent=LatentShape(rank=16, plain=8, value=8), num_kv_heads=1)
    assert lacks_adapters(shape) == "adapters of attention over latents"
    folder = write_for_shape(tmp_path / "adapter", 1)
    with pytest.raises(BadAdapter):
        read_adapter(folder, shape, 64)


@pytest.mark.parametrize("name", ["torch", "native"])
def test_steps_with_an_empty_slot_are_refused(name: str, tmp_path: Path) -> None:
    """Never the base instead."""
    weights = weights_of(SHAPE, torch.float32)
    backend: Any = (
        TorchBackend(SHAPE, weights) if name == "torch" else NativeBackend(SHAPE, weights, torch.float32)
    )
    runner = Runner(Model(SHAPE, "fp32", torch.float32, backend, "native"))
    memory = KVMemory(layout_of(SHAPE, 16, torch.float32), 1)
    step = SequenceStep(memory, [0], 0, [1, 2], True, adapter=0)
    with pytest.raises(BatchError, match="row 0: there is no adapter in slot 0"):
        runner.step([step])
    assert runner.allow_adapters(2, 8) is None
    with pytest.raises(BatchError, match="there is no adapter in slot 0"):
        runner.step([step])
    prepared = runner.prepare_adapter(read_adapter(write_for_shape(tmp_path / "a", 1), SHAPE, 8))
    runner.place_adapter(0, prepared)
    assert runner.step([step]).shape == (1, 131)
    runner.place_adapter(0, None)
    with pytest.raises(BatchError, match="there is no adapter in slot 0"):
        runner.step([step])
