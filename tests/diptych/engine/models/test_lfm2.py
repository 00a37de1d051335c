"""LFM2: every switch of its short convolutions as transformers computes them, and its published sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.parallel_model import Dealing, open_parts
from diptych.engine.weights import Checkpoint
from diptych.engine.weights.checkpoint import read_checkpoint, shape_of
from diptych.engine.weights.hf_config import resolve_config, shape_from_config
from diptych.planner.capacity import Worker, worker_of
from diptych.planner.model_costs import model_costs
from tests.diptych.engine.models.published_hybrids import PUBLISHED
from tests.diptych.engine.weights.gguf_files import finish

Case = tuple[Path, Lfm2ForCausalLM, torch.Tensor]
CONV, FULL = "conv", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 130,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"layer_types": [CONV, FULL, CONV, CONV], "block_multiple_of": 8},
    "old-names": {
        "full_attn_idxs": [0, 3],
        "num_hidden_layers": 4,
        "block_ff_dim": 150,
        "tie_embedding": False,
    },
    "biased": {
        "layer_types": [CONV, CONV, FULL],
        "conv_bias": True,
        "conv_L_cache": 5,
        "block_auto_adjust_ff_dim": False,
    },
    "one-tap": {"layer_types": [FULL, CONV], "conv_L_cache": 1, "block_ffn_dim_multiplier": 1.7},
}
TEXT = [(17 * n + 5) % 131 for n in range(70)]


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor]:
    """Return a random model's folder, transformers' model, and its logits of the text."""
    fields = {**SIZES, **CASES[request.param]}
    fields.setdefault("num_hidden_layers", len(fields.get("layer_types", ())))
    torch.manual_seed(11)
    oracle = Lfm2ForCausalLM(Lfm2Config(**fields)).eval().float()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            about = 1.0 if "norm" in name else 0.0
            parameter.normal_(about, 0.5 if name.endswith("bias") or about else 0.2)
        logits = oracle(torch.tensor([TEXT]), use_cache=False).logits[0]
    folder = tmp_path_factory.mktemp("lfm2")
    oracle.save_pretrained(folder)
    return folder, oracle, logits


Make = Callable[[Checkpoint], Any]


def in_torch(checkpoint: Checkpoint) -> TorchBackend:
    return TorchBackend(checkpoint.shape, checkpoint.weights)


def natively(checkpoint: Checkpoint) -> NativeBackend:
    dense = checkpoint.weights.storage == "dense" and checkpoint.weights.embed.dtype == torch.float32
    dtype = torch.float32 if dense else torch.bfloat16
    return NativeBackend(checkpoint.shape, checkpoint.weights, dtype)


def logits_of(checkpoint: Checkpoint, chunk: int, make: Make = in_torch) -> torch.Tensor:
    backend = make(checkpoint)
    native = make is natively and checkpoint.weights.embed.dtype == torch.bfloat16
    layout = kv_layout(checkpoint.shape, torch.bfloat16 if native else torch.float32, 16)
    memory = KVMemory(layout, own_blocks(layout, len(TEXT)))
    memory.data.fill_(torch.nan)
    table, pages = own_tables(layout, range(memory.num_blocks))
    rows = []
    for start in range(0, len(TEXT), chunk):
        part = TEXT[start : start + chunk]
        step = SequenceStep(memory, table, start, part, True, trailing=len(part), window_tables=pages)
        rows.append(backend.forward([step], None))
    return torch.cat(rows)


BOTH = pytest.mark.parametrize("make", [in_torch, natively])


@BOTH
@pytest.mark.parametrize("chunk", [1, 7, 70])
def test_logits_are_those_of_transformers(case: Case, chunk: int, make: Make) -> None:
    folder, _, expected = case
    found = logits_of(read_checkpoint(folder, "fp32"), chunk, make)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "field", ["in_proj", "conv", "out_proj", "in_proj_bias", "conv_bias", "out_proj_bias"]
)
@BOTH
def test_each_tensor_counts(case: Case, field: str, make: Make) -> None:
    """Control: its rows, or a filter's taps, the other way round."""
    folder, _, expected = case
    checkpoint = read_checkpoint(folder, "fp32")
    first = checkpoint.shape.recurrent_layers[0]
    given = checkpoint.weights.layers[first].recurrent
    assert given is not None
    tensor = given.get(field)
    if not isinstance(tensor, torch.Tensor) or tensor.shape[-1] == 1:
        pytest.skip("the model has no such tensor")
    turned = replace(checkpoint.weights.layers[first], recurrent={**given, field: tensor.flip(-1)})
    layers = list(checkpoint.weights.layers)
    layers[first] = turned
    spoiled = replace(checkpoint, weights=replace(checkpoint.weights, layers=tuple(layers)))
    assert not torch.allclose(logits_of(spoiled, 70, make), expected, atol=1e-2)


@BOTH
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_rounded_weights_come_close(case: Case, precision: Any, make: Make) -> None:
    folder, _, expected = case
    checkpoint = read_checkpoint(folder, precision)
    found = logits_of(checkpoint, 70, make).log_softmax(-1)
    exact = expected.log_softmax(-1)
    divergence = float((exact.exp() * (exact - found)).sum(-1).mean())
    assert divergence < 0.05, divergence


def write_gguf(oracle: Lfm2ForCausalLM, path: Path, kind: gguf.GGMLQuantizationType | None = None) -> Path:
    """Write a model as llama.cpp's converter does: KV heads by layer, filters without their middle axis."""
    config, writer = oracle.config, gguf.GGUFWriter(path, "lfm2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(oracle.model.layers[0].feed_forward.w1.out_features)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (kind == FULL) for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, config.num_hidden_layers)
    for name, parameter in oracle.named_parameters():
        array = parameter.detach().numpy()
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if "conv.conv.weight" in name:
            array = array.squeeze(1)
        elif kind is not None and array.ndim == 2 and array.shape[1] % 32 == 0:
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
            continue
        writer.add_tensor(stored, array.copy())
    finish(writer)
    return path


def test_a_gguf_file_has_transformers_logits(case: Case, tmp_path: Path) -> None:
    _, oracle, expected = case
    path = write_gguf(oracle, tmp_path / "model.gguf")
    if oracle.config.conv_bias:
        with pytest.raises(UnsupportedModel, match="shortconv"):
            read_checkpoint(path, "fp32")
        return
    checkpoint = read_checkpoint(path, "fp32")
    assert shape_of(path) == checkpoint.shape
    torch.testing.assert_close(logits_of(checkpoint, 23), expected, rtol=0, atol=1e-4)


@BOTH
@pytest.mark.parametrize("precision", ["gguf", "int8", "fp32"])
def test_a_quantised_gguf_file_comes_close(case: Case, tmp_path: Path, precision: Any, make: Make) -> None:
    _, oracle, expected = case
    if oracle.config.conv_bias:
        pytest.skip("no GGUF file has biases")
    checkpoint = read_checkpoint(
        write_gguf(oracle, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0), precision
    )
    found, exact = logits_of(checkpoint, 70, make).log_softmax(-1), expected.log_softmax(-1)
    assert float((exact.exp() * (exact - found)).sum(-1).mean()) < 0.05


def test_it_is_not_dealt_to_parts(case: Case) -> None:
    with pytest.raises(UnsupportedModel, match="the recurrent layers of lfm2 are not dealt to parts"):
        open_parts(case[0], "fp32", Dealing(2))


def shape(**changes: Any) -> ModelShape:
    return shape_from_config(resolve_config({**PUBLISHED["LFM2-1.2B"], **changes}), tied=True)


def test_published_sizes() -> None:
    found = shape()
    assert found.attention_layers == (2, 5, 8, 10, 12, 14)
    assert found.intermediate_size == 8192
    assert found.num_layers == 16
    costs = model_costs(found)
    assert costs.parameters / 1e9 == pytest.approx(1.170, abs=5e-4)
    assert costs.kv_bytes == 6 * 2 * 8 * 64 * 2
    assert costs.state_bytes == 64 + 10 * 2 * 2048 * 4
    layout = kv_layout(found, torch.bfloat16, 16)
    assert layout.windows is not None
    assert layout.windows.tables == 1
    assert layout.bytes_per_block == 16 * costs.kv_bytes


def test_a_plan_counts_two_states_a_stream() -> None:
    costs = model_costs(shape())
    worker = worker_of(costs, 24e9)
    assert worker.stream_bytes == 2 * costs.state_bytes
    assert worker.streams(100) < replace(worker, stream_bytes=0.0).streams(100)
    assert Worker(10.0, 1.0, 1.0, 1.0).streams(3) == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["conv"] * 16}, "no layer attends"),
        ({"layer_types": ["conv", "mamba"] * 8}, "layer_types: mamba"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types names 2 of 16 layers"),
        ({"block_multiple_of": 0}, "block_multiple_of is 0"),
        ({"conv_L_cache": "3"}, "conv_L_cache"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type 'ntk'"),
    ],
)
def test_what_is_no_such_model_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        shape(**fields)
