"""The decoder against transformers: every family, odd sizes, block borders, chunked and whole."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from diptych.engine.backends.native.backend import NativeUnavailable
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import BackendChoice, Model, load_model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.runner import Runner

BLOCK = 16
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}
ODD = {**SIZES, "head_dim": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**ODD),
    "llama-tied-biased": LlamaConfig(**ODD, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": LlamaConfig(**ODD, rope_parameters=LLAMA3),
    "llama-linear-rope": LlamaConfig(**ODD, rope_parameters=LINEAR),
    "llama-one-kv-head": LlamaConfig(**{**ODD, "num_key_value_heads": 1}),
    "mistral": MistralConfig(**ODD, sliding_window=None),
    "mistral-window": MistralConfig(**ODD, sliding_window=19),
    "ministral": MinistralConfig(**ODD, sliding_window=19, layer_types=MIXED),
    "qwen2": Qwen2Config(**{**SIZES, "hidden_size": 240}),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=17, max_window_layers=1),
    "qwen2-yarn": Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": Qwen3Config(**ODD),
    "qwen3-tied-biased": Qwen3Config(**ODD, tie_word_embeddings=True, attention_bias=True),
}


def save(config: PreTrainedConfig, folder: Path) -> Any:
    """Save a random model of `config` in `folder` and return transformers' own."""
    torch.manual_seed(11)
    oracle = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            # Fresh models have norms of one and biases of zero, which would hide a missing one.
            scale = 0.5 if name.endswith("bias") or "norm" in name else 0.15
            parameter.normal_(1.0 if "norm" in name else 0.0, scale)
    oracle.save_pretrained(folder)
    return oracle


def last_logits(model: Model, ids: list[int], chunk: int) -> torch.Tensor:
    """Logits after each chunk's last token, through shuffled blocks: `[chunks, vocab]`."""
    layout = model.kv_layout(BLOCK)
    memory = KVMemory(layout, 40)
    memory.data.fill_(torch.nan)  # a read of anything unwritten must show
    table = torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist()
    runner = Runner(model, threads=1)
    rows = []
    for start in range(0, len(ids), chunk):
        step = SequenceStep(memory, table, start, ids[start : start + chunk], wants_logits=True)
        rows.append(runner.step([step]))
    return torch.cat(rows)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_logits_equal_transformers(name: str, backend: BackendChoice, tmp_path: Path) -> None:
    oracle = save(CONFIGS[name], tmp_path)
    model = load_model(tmp_path, torch.float32, backend=backend)
    assert model.backend_name == backend
    ids = torch.randint(0, 131, (97,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    for length in (1, 15, 16, 17, 32, 97):
        got = last_logits(model, ids[:length], chunk=length)
        torch.testing.assert_close(got[0], expected[length - 1], atol=1e-4, rtol=0)
    for chunk in (1, 16, 23):
        got = last_logits(model, ids, chunk)
        ends = [min(start + chunk, len(ids)) - 1 for start in range(0, len(ids), chunk)]
        torch.testing.assert_close(got, expected[ends], atol=1e-4, rtol=0)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=["llama3", "yarn"])
@pytest.mark.parametrize("within", [True, False], ids=["within-too", "beside-alone"])
def test_a_trained_length_beside_the_scaling_counts_as_for_transformers(
    scaling: dict[str, Any], within: bool, tmp_path: Path
) -> None:
    save(CONFIGS["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    length = "original_max_position_embeddings"
    rope = {key: value for key, value in scaling.items() if within or key != length}
    config |= {"rope_parameters": rope, length: 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(0, 131, (97,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0, -1]
    got = last_logits(load_model(tmp_path, torch.float32, backend="torch"), ids, 97)[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_mistral_whose_layers_differ_is_a_ministral(tmp_path: Path) -> None:
    """transformers reads a config so that says mistral and which of its layers have the window."""
    save(CONFIGS["mistral"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"sliding_window": 19, "layer_types": MIXED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = list(range(60))
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0, -1]
    model = load_model(tmp_path, torch.float32, backend="torch")
    assert model.shape.windows == (None, 19, 19)
    torch.testing.assert_close(last_logits(model, ids, 60)[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(backend: BackendChoice, tmp_path: Path) -> None:
    oracle = save(CONFIGS["llama"], tmp_path)
    ids = list(range(40))
    got = last_logits(load_model(tmp_path, torch.bfloat16, backend=backend), ids, 40)[0]
    assert got.dtype == torch.float32
    with torch.no_grad():
        exact = oracle(torch.tensor([ids])).logits[0, -1]
        peer = oracle.bfloat16()(torch.tensor([ids])).logits[0, -1].float()
    assert (got - exact).norm() < 1.5 * (peer - exact).norm()


def test_auto_warns_when_it_falls_back_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise NativeUnavailable("Resource temporarily unavailable")

    save(CONFIGS["llama"], tmp_path)
    monkeypatch.setattr("diptych.engine.backends.native.load.NativeBackend", fail)
    assert load_model(tmp_path, torch.float32).backend_name == "torch"
    [said] = [record for record in caplog.records if record.name == "diptych.engine.loaded_model"]
    assert said.levelno == logging.WARNING
    assert "torch computes, which is slower: Resource temporarily unavailable" in said.getMessage()


def test_sharded_folders_are_read(tmp_path: Path) -> None:
    oracle = save(CONFIGS["qwen3"], tmp_path / "whole")
    oracle.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    ids = list(range(20))
    one, other = (
        last_logits(load_model(tmp_path / folder, torch.float32, backend="torch"), ids, 20)
        for folder in ("whole", "shards")
    )
    # Not to the bit: where a tensor lies in memory decides how torch's library sums over it.
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_load_model_names_what_is_not_computed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "nowhere", torch.float32, backend="torch")
    LlamaConfig(**ODD, hidden_act="tanh").save_pretrained(tmp_path)
    save(CONFIGS["llama"], tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="hidden_act"):
        load_model(tmp_path, torch.float32, backend="torch")
    with pytest.raises(UnsupportedModel, match="dtype fp16 is not computed on cpu"):
        load_model(tmp_path, torch.float16, backend="torch")
    with pytest.raises(UnsupportedModel, match="dtype int8 is not computed on cuda; fp32, fp16, bf16,"):
        load_model(tmp_path, "int8", device="cuda")
    for backend in ("auto", "native"):
        with pytest.raises(UnsupportedModel, match="kv-cache-dtype fp8: the native CPU step"):
            load_model(tmp_path, torch.float32, backend=backend, kv_cache="fp8")
    with pytest.raises(UnsupportedModel, match="kv-cache-dtype int8: a GPU keeps"):
        load_model(tmp_path, torch.float32, device="cuda", kv_cache="int8")
    with pytest.raises(UnsupportedModel, match="backend native computes on the CPU"):
        load_model(tmp_path, torch.float32, backend="native", device="cuda")
