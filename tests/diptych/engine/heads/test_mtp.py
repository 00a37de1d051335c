"""Layers for multi-token prediction equal transformers', and are read from the model's own folder alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.engine.batch import SequenceStep
from diptych.engine.heads.feature_head import HeadStep
from diptych.engine.heads.head_files import BadHeads
from diptych.engine.heads.layer_head import LayerHead
from diptych.engine.heads.mtp_files import check_mtp, read_mtp
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import BackendChoice, load_model
from diptych.engine.runner import Runner
from tests.diptych.engine.heads import mtp_models

IDS = torch.randint(0, 131, (29,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize(
    ("name", "backend"), [("deepseek_v3", "torch"), ("glm4_moe", "torch"), ("glm4_moe", "native")]
)
def test_features_and_the_layer_equal_transformers_in_chunks(
    name: str, backend: BackendChoice, tmp_path: Path
) -> None:
    oracle, own = mtp_models.write(tmp_path, name)
    model = load_model(tmp_path, "fp32", backend=backend)
    given = mtp_models.features(oracle, IDS)
    torch.testing.assert_close(_features(model), given, atol=2e-5, rtol=1e-4)
    head = read_mtp(tmp_path, model.shape, None, torch.float32)
    assert head.layers == (model.shape.num_layers,)
    before = torch.cat([torch.zeros_like(given[:1]), given[:-1]])
    wanted = mtp_models.through(oracle, own, IDS, before)
    got = _through(head, before)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.logits(got), oracle.lm_head(wanted).detach(), atol=1e-3, rtol=1e-4)
    swapped = mtp_models.through(oracle, own, IDS, given)  # a control: features of the token itself
    assert not torch.allclose(got, swapped, atol=1e-2)


def _features(model: Any) -> torch.Tensor:
    """Return the features of IDS, in two chunks of which only the last one wants logits."""
    runner = Runner(model, threads=1)
    assert runner.give_features((model.shape.num_layers,)) is None
    memory, found = KVMemory(model.kv_layout(16), 2), []
    for start, end in ((0, 17), (17, 29)):
        step = SequenceStep(memory, [1, 0], start, IDS[start:end], wants_logits=end == 29)
        output = runner.step_and_sample([step], [None] * step.logit_rows)
        assert output.features is not None
        assert len(output.tokens) == step.logit_rows
        assert len(output.logits) == step.logit_rows
        found.append(output.features)
    return torch.cat(found)


def _through(head: LayerHead, before: torch.Tensor) -> torch.Tensor:
    memory, found = KVMemory(head.kv_layout(16), 2), []
    for start, end in ((0, 11), (11, 28), (28, 29)):
        step = HeadStep([1, 0], start, IDS[start:end], head.fuse(before[start:end]))
        found.append(head.step(memory, [step]))
    return torch.cat(found)


def test_what_is_the_models_once_more_may_be_missing(tmp_path: Path) -> None:
    mtp_models.write(tmp_path, "glm4_moe")
    model = load_model(tmp_path, "fp32", backend="torch")
    whole = read_mtp(tmp_path, model.shape, None, torch.float32)
    _change(tmp_path, drop=("shared_head.head.weight", "embed_tokens.weight"))
    given = torch.randn(len(IDS), model.shape.hidden_size, generator=torch.Generator().manual_seed(3))
    head = read_mtp(tmp_path, model.shape, None, torch.float32)
    found, wanted = (one.logits(_through(one, given)) for one in (head, whole))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


def test_what_cannot_draft_is_refused_in_words(tmp_path: Path) -> None:
    mtp_models.write(tmp_path, "glm4_moe")
    shape = load_model(tmp_path, "fp32", backend="torch").shape
    assert check_mtp(tmp_path, shape) == "1 multi-token prediction layer, of which the first one drafts"
    _change(tmp_path, replaced={"enorm.weight": torch.ones(3)})
    with pytest.raises(BadHeads, match=r"layers.3.enorm.weight is \(3,\), not \(84,\)"):
        read_mtp(tmp_path, shape, None, torch.float32)
    _change(tmp_path, replaced={"enorm.weight": torch.ones(84) / 0})
    with pytest.raises(BadHeads, match=r"layers.3.enorm.weight has numbers that are not finite"):
        read_mtp(tmp_path, shape, None, torch.float32)
    _change(tmp_path, replaced={"eh_proj.weight": torch.ones(84, 168, dtype=torch.int8)})
    with pytest.raises(BadHeads, match=r"layers.3.eh_proj.weight .I8.: the config does not say"):
        read_mtp(tmp_path, shape, None, torch.float32)
    _change(tmp_path, drop=("eh_proj.weight",))
    for read in (lambda: check_mtp(tmp_path, shape), lambda: read_mtp(tmp_path, shape, None, torch.float32)):
        with pytest.raises(BadHeads, match=r"tensor model.layers.3.eh_proj.weight is missing"):
            read()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(BadHeads, match=r"no multi-token prediction layers \(num_nextn_predict_layers in"):
        check_mtp(tmp_path, shape)
    with pytest.raises(BadHeads, match="are read from folders with safetensors"):
        check_mtp(tmp_path / "model.gguf", shape)


def _change(folder: Path, drop: Sequence[str] = (), replaced: dict[str, torch.Tensor] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in drop:
        del tensors[f"model.layers.3.{name}"]
    for name, tensor in (replaced or {}).items():
        tensors[f"model.layers.3.{name}"] = tensor
    save_file(tensors, folder / "model.safetensors")
