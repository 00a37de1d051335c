"""Adapters against transformers with merged weights: every family's mapping, both formats, mixed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.supports import supports as triton_computes
from diptych.engine.loaded_model import Model
from diptych.engine.weights import Checkpoint
from diptych.engine.weights.checkpoint import read_checkpoint
from tests.adapters import merged, modules_of, write_adapter
from tests.diptych.engine.adapters.adapted_steps import AdaptedSteps
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.models.family_models import (
    CASES,
    config_of,
    oracle_logits,
    oracle_of,
    save,
    text_of,
)
from tests.diptych.engine.weights import gguf_files
from tests.kernels.cpu.tiny_models import EVERY_SET, KINDS, shape_of

IN_CI = ("phi3", "granite4", "glm4-quarter", "gemma2", "arcee")
"""Fused and split matrices, reordered rows, norms around, no gate."""
FAMILIES = [name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in CASES]


def native_of(checkpoint: Checkpoint) -> NativeBackend:
    return NativeBackend(checkpoint.shape, checkpoint.weights, torch.float32)


def device_of(checkpoint: Checkpoint) -> TritonBackend:
    return TritonBackend(checkpoint.shape, checkpoint.weights, "cpu", REFERENCE_OPERATORS)


def torch_of(checkpoint: Checkpoint) -> TorchBackend:
    return TorchBackend(checkpoint.shape, checkpoint.weights)


def targets_of(oracle: Any) -> list[str]:
    """Return the last names of all linear modules within layers."""
    names = (name for name, one in oracle.named_modules() if isinstance(one, torch.nn.Linear))
    return sorted({name.rpartition(".")[2] for name in names if ".layers." in name})


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    oracle = oracle_of(config_of(name))
    checkpoint = read_checkpoint(save(oracle, tmp_path / "model"), "fp32")
    one, other = (
        write_adapter(tmp_path / str(seed), oracle, seed=seed, targets=targets_of(oracle)) for seed in (1, 2)
    )
    texts = [text_of(40, seed=seed) for seed in (1, 2, 3)]
    expected = [
        oracle_logits(model, text)
        for model, text in zip((merged(oracle, one), oracle, merged(oracle, other)), texts, strict=True)
    ]
    makers: list[Callable[[Checkpoint], Any]] = [torch_of]
    if checkpoint.shape.norm == "rms" and not checkpoint.shape.parallel_residual:
        makers.append(native_of)
    if triton_computes(checkpoint.shape) is None:
        makers.append(device_of)
    for make in makers:
        steps = AdaptedSteps(make(checkpoint), checkpoint.shape, torch.float32, [one, other])
        for got, want in zip(steps.logits(texts, [0, None, 1], 17), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)
        swapped = steps.logits(texts, [1, None, 0], 17)
        assert (swapped[0] - expected[0]).abs().max() > 0.1, "adapters that are swapped should show"


@pytest.mark.parametrize(
    "fields",
    [
        {"use_rslora": True, "rank": 9},
        {"ranks": {"q_proj": 2, "layers.1.mlp.up_proj": 6}},
        {"alpha_pattern": {"down_proj": 3.0, r"layers\.[02]\.self_attn\.k_proj": 1.0}},
        {"layers": [1, 3]},
        {"targets": ["q_proj", "v_proj"], "target_modules": r".*\.(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"dtype": torch.bfloat16, "rank": 1},
        {"targets": ["v_proj"], "strength": 3.0},
    ],
    ids=str,
)
def test_every_field_of_the_configuration_counts(fields: dict[str, Any], tmp_path: Path) -> None:
    oracle = oracle_of(config_of("cwm"))
    checkpoint = read_checkpoint(save(oracle, tmp_path / "model"), "fp32")
    folder = write_adapter(tmp_path / "adapter", oracle, seed=3, **fields)
    text = text_of(30)
    expected = oracle_logits(merged(oracle, folder), text)
    assert (oracle_logits(oracle, text) - expected).abs().max() > 0.1
    for make in (torch_of, native_of):
        (got,) = AdaptedSteps(make(checkpoint), checkpoint.shape, torch.float32, [folder]).logits(
            [text], [0], 30
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)


SHAPE = shape_of(qkv_bias=True, output_bias=True, mlp_bias=True)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_for_shape(folder: Path, seed: int, **fields: Any) -> Path:
    """Write an adapter for SHAPE, of which there is no transformers model."""
    sizes = {
        "self_attn.q_proj": (240, 100),
        "self_attn.k_proj": (120, 100),
        "self_attn.v_proj": (120, 100),
        "self_attn.o_proj": (100, 240),
        "mlp.gate_proj": (150, 100),
        "mlp.up_proj": (150, 100),
        "mlp.down_proj": (100, 150),
    }
    torch.manual_seed(0)  # the sizes of changes go by those of the matrices
    model = torch.nn.ModuleDict()
    layers = torch.nn.ModuleList()
    for _ in range(SHAPE.num_layers):
        layer = torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict(), "mlp": torch.nn.ModuleDict()})
        for name, (out, inner) in sizes.items():
            group, _, own = name.partition(".")
            layer[group][own] = torch.nn.Linear(inner, out)
        layers.append(layer)
    model["model"] = torch.nn.ModuleDict({"layers": layers})
    return write_adapter(folder, model, seed=seed, **fields)


@pytest.mark.parametrize(("kind", "instructions"), EVERY_SET, ids=str)
def test_native_rows_keep_their_bits_beside_other_adapters(
    kind: str, instructions: str, tmp_path: Path
) -> None:
    _, dtype, weights = KINDS[kind]
    folders = [
        write_for_shape(tmp_path / "all", 1, rank=5),
        write_for_shape(tmp_path / "some", 2, rank=16, targets=["k_proj", "up_proj", "o_proj"]),
        write_for_shape(tmp_path / "wide", 3, rank=33),
    ]
    backend = NativeBackend(SHAPE, weights(SHAPE), dtype, instructions)
    meaning = TorchBackend(SHAPE, weights(SHAPE))
    texts = [text_of(20 + seed, seed=seed) for seed in range(16)]
    slots = [(None, 0, 1, 2)[number % 4] for number in range(16)]
    steps = AdaptedSteps(backend, SHAPE, dtype, folders)
    backend.set_threads(2)
    mixed = steps.logits(texts, slots, 7)
    backend.set_threads(1)
    for number in (0, 5, 10, 15):
        (alone,) = steps.logits([texts[number]], [slots[number]], 36)
        assert torch.equal(alone, mixed[number]), "bits depend on the neighbours"
    reference = AdaptedSteps(meaning, SHAPE, dtype if kind == "bf16" else torch.float32, folders)
    expected = reference.logits(texts[:4], slots[:4], 36)
    for got, want in zip(mixed, expected, strict=False):
        error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < (1e-5 if kind == "fp32" else 0.05), error


@pytest.mark.parametrize("kind", ["fp32", "blocks"])
def test_torch_rows_keep_their_bits_beside_other_adapters(kind: str, tmp_path: Path) -> None:
    """Torch's own products depend on how many rows there are, so there are as many each time."""
    weights = KINDS[kind][2](SHAPE)
    folders = [write_for_shape(tmp_path / str(seed), seed) for seed in (1, 2, 3)]
    steps = AdaptedSteps(TorchBackend(SHAPE, weights), SHAPE, torch.float32, folders)
    texts = [text_of(9, seed=seed) for seed in range(16)]
    slots = [(None, 0, 1, 2)[number % 4] for number in range(16)]
    mixed = steps.logits(texts, slots, 5)
    for slot in (None, 0, 1, 2):
        for number, logits in enumerate(steps.logits(texts, [slot] * 16, 5)):
            assert torch.equal(logits, mixed[number]) is (slots[number] == slot)


def test_gguf_adapter_has_the_logits_of_the_peft_folder(tmp_path: Path) -> None:
    """Rows of q and k are reordered in both files, the base's and the adapter's."""
    torch.manual_seed(0)
    oracle = gguf_files.AutoModelForCausalLM.from_config(gguf_files.CONFIGS["llama"]).eval()
    checkpoint = read_checkpoint(save(oracle, tmp_path / "model"), "fp32")
    folder = write_adapter(tmp_path / "adapter", oracle, seed=5)
    path = write_gguf_adapter(tmp_path / "adapter.gguf", folder, heads={"attn_q": 4, "attn_k": 2})
    text = [token % 96 for token in text_of(30)]
    expected = oracle_logits(merged(oracle, folder), text)
    for source in (folder, path):
        steps = AdaptedSteps(torch_of(checkpoint), checkpoint.shape, torch.float32, [source])
        (got,) = steps.logits([text], [0], 30)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    unordered = write_gguf_adapter(tmp_path / "unordered.gguf", folder, heads={})
    (wrong,) = AdaptedSteps(torch_of(checkpoint), checkpoint.shape, torch.float32, [unordered]).logits(
        [text], [0], 30
    )
    assert (wrong - expected).abs().max() > 0.01, "rows out of order should show"


def write_gguf_adapter(path: Path, folder: Path, heads: dict[str, int]) -> Path:
    """Write a PEFT folder as llama.cpp's converter does, rows of B reordered by `heads`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, _, letter = (
            name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        )
        for ours, theirs in gguf_files.NAMES:
            module = module.replace(ours, theirs)
        numbers = tensor
        count = heads.get(module.rpartition(".")[2])
        if letter == "B" and count is not None:
            width = tensor.shape[0] // count
            numbers = tensor.view(count, 2, width // 2, -1).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{module}.weight.lora_{letter.lower()}", numbers.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "bundled_model", ["native", pytest.param("torch", marks=pytest.mark.full)], indirect=True
)
def test_bundled_model_streams_of_the_base_and_three_adapters_are_those_of_merged_weights(
    bundled_model: Model, oracle: Any, tmp_path: Path
) -> None:
    backend, shape = bundled_model.backend, bundled_model.shape
    targets = (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj"), tuple(MODULES))
    folders = [
        write_adapter(tmp_path / str(seed), oracle, seed=seed, rank=8, alpha=16, targets=some, strength=0.3)
        for seed, some in enumerate(targets)
    ]
    assert len(modules_of(oracle, MODULES)) == 210
    prompts = [[(37 * n + 11 * number) % 40_000 for n in range(5 + number)] for number in range(16)]
    slots: Sequence[int | None] = [(None, 0, 1, 2)[number % 4] for number in range(16)]
    steps = AdaptedSteps(backend, shape, torch.float32, folders)
    tokens, logits = steps.greedy(prompts, slots, 6)
    for number in range(4):
        model = oracle if slots[number] is None else merged(oracle, folders[slots[number]])  # type: ignore[index]
        text = [*prompts[number], *tokens[number]]
        wanted = oracle_logits(model, text)[len(prompts[number]) - 1 : -1]
        assert tokens[number] == wanted.argmax(dim=-1).tolist()
        torch.testing.assert_close(logits[number], wanted, rtol=1e-3, atol=2e-3)
        if bundled_model.backend_name == "native":
            (alone,), (own,) = steps.greedy(prompts[number : number + 1], slots[number : number + 1], 6)
            assert alone == tokens[number]
            assert torch.equal(own, logits[number]), "bits depend on the neighbours"
    for number in (1, 2, 3):
        other = (None, 1, 2, 0)[number]
        (wrong,), _ = steps.greedy(prompts[number : number + 1], [other], 6)
        assert wrong != tokens[number], "adapters that are swapped should show"
