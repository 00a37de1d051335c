"""EAGLE heads and multi-token prediction layers at --speculative-model: loaded or refused by both workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from decode_worker.config import DecodeSettings
from decode_worker.drafters import make_speculation
from diptych.cli.app import app
from diptych.cli.doctor import given_draft
from diptych.engine.heads.feature_head import FeatureHead, HeadStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.planner.model_shape import NotPlanned, read_shape
from diptych.worker_process.medusa_loader import UnfitHeads
from prefill_worker.config import PrefillSettings
from tests.diptych.engine.heads import mtp_models
from tests.diptych.engine.heads.test_eagle import CONFIG, SIZES
from tests.diptych.worker_process.test_medusa_loader import loaded
from tests.end_to_end import tiny_model

HIDDEN = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a layer for multi-token prediction."""
    folder = tmp_path_factory.mktemp("model") / "glm"
    tiny_model.write(folder)  # its tokenizer stays
    mtp_models.write(
        folder, "glm4_moe", vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"]
    )
    return folder


def write_eagle(folder: Path, model: Path, **config: object) -> Path:
    """Write a random EAGLE head in the authors' form for a model of width 64."""
    sizes = {
        **{name: tuple({16: HIDDEN, 32: 2 * HIDDEN}.get(n, n) for n in size) for name, size in SIZES.items()},
        **{
            f"layers.0.self_attn.{n}_proj.weight": (rows, HIDDEN)
            for n, rows in (("q", 16), ("k", 8), ("v", 8))
        },
        "layers.0.self_attn.o_proj.weight": (HIDDEN, 16),
    }
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(size, generator=generator) * 0.1 for name, size in sizes.items()}
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    folder.mkdir()
    fields = CONFIG | {"vocab_size": vocab, "hidden_size": HIDDEN, **config}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


def features_of(head: FeatureHead) -> torch.Tensor:
    """Return what the head gives for three tokens."""
    hidden = head.shape.hidden_size
    step = HeadStep([0], 0, [3, 1, 4], torch.linspace(-1, 1, 3 * hidden).view(3, hidden))
    return head.step(KVMemory(head.kv_layout(16), 1), [step])


@pytest.mark.parametrize(("dtype", "parts"), [("fp32", 1), ("bf16", 1), ("fp32", 2)])
async def test_both_workers_load_a_head_with_the_models_embedding_and_output_matrix(
    dtype: str, parts: int, tiny: Path, tmp_path: Path
) -> None:
    """A worker of several parts has shares of these, and reads them whole for the head."""
    path = write_eagle(tmp_path / "head", tiny)
    flags = (f"--speculative-model={path}", f"--dtype={dtype}")
    settings, engine = await loaded(tiny, *flags)
    dealt = ("--backend=torch", f"--sum-parts={parts}")
    _, other = await loaded(tiny, *flags, *dealt, kind=PrefillSettings)
    assert engine.eagle is not None
    assert other.eagle is not None
    assert engine.layout.draft == engine.eagle.head.kv_layout(settings.block_size)
    assert engine.fingerprint.draft_digest == other.fingerprint.draft_digest != ""
    given, wanted = (features_of(one.eagle.head) for one in (engine, other))
    assert torch.equal(given, wanted)
    assert torch.equal(engine.eagle.head.logits(given), other.eagle.head.logits(wanted))
    output = tiny_model.oracle(tiny).lm_head(given.float().clone()).detach()
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == "fp32" else {"atol": 0.1, "rtol": 0.1}
    torch.testing.assert_close(engine.eagle.head.logits(given), output, **close)
    assert make_speculation(settings, engine, KVMemory(engine.layout, 4)) is not None
    assert given_draft(str(path), str(tiny)).text == "an EAGLE head with the model's output matrix"


async def test_a_models_own_layers_draft_where_mtp_is_said(predicting: Path) -> None:
    settings, engine = await loaded(predicting, "--speculative-model=mtp")
    _, other = await loaded(predicting, "--speculative-model=mtp", kind=PrefillSettings)
    _, without = await loaded(predicting)
    assert engine.eagle is not None
    assert engine.layout.draft == engine.eagle.head.kv_layout(settings.block_size)
    assert engine.fingerprint == other.fingerprint != without.fingerprint
    assert make_speculation(settings, engine, KVMemory(engine.layout, 4)) is not None
    assert given_draft("mtp", str(predicting)).text.startswith("1 multi-token prediction layer")


async def test_what_does_not_fit_is_refused_at_the_start(tiny: Path, tmp_path: Path) -> None:
    for kind in (DecodeSettings, PrefillSettings):
        with pytest.raises(UnfitHeads, match=r"--speculative-model mtp: .* no multi-token prediction"):
            await loaded(tiny, "--speculative-model=mtp", kind=kind)
    assert given_draft("mtp", str(tiny)).state == "missing"
    narrow = write_eagle(tmp_path / "narrow", tiny, hidden_size=32)
    with pytest.raises(UnfitHeads, match="a head of width 32, the model's is 64"):
        await loaded(tiny, f"--speculative-model={narrow}")
    assert given_draft(str(narrow), str(tiny)).state == "missing"


def test_heads_are_not_planned(tiny: Path, tmp_path: Path) -> None:
    head = write_eagle(tmp_path / "head", tiny)
    with pytest.raises(NotPlanned, match="holds drafting heads"):
        read_shape(head)
    asked = ["plan", "--gpu", "h100", "--model", str(tiny), "--rate", "1", "--speculative-model", "mtp"]
    answer = CliRunner().invoke(app, asked, env={"COLUMNS": "200"})
    assert answer.exit_code == 2
    assert "layers that draft are not planned" in answer.output
