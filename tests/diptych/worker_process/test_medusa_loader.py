"""Heads at --speculative-model: loaded by the worker that decodes, refused in words by all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from decode_worker.config import DecodeSettings
from decode_worker.drafters import ImpossibleTree, make_speculation
from diptych.cli.doctor import given_draft
from diptych.engine.backend import Backend
from diptych.engine.heads.medusa import WEIGHTS
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.runtime.settings import StartupError
from diptych.worker_process.eagle_loader import EagleFiles, load_eagle
from diptych.worker_process.engine_loader import load_engine
from diptych.worker_process.loaded_engine import LoadedEngine
from diptych.worker_process.medusa_loader import UnfitHeads, load_medusa
from prefill_worker.config import PrefillSettings
from tests.diptych.engine.heads import test_eagle3
from tests.diptych.worker_process.both_workers import model
from tests.end_to_end import tiny_model

HIDDEN = 64


class Plain:
    """A backend that computes steps and nothing more."""

    def __init__(self, backend: Backend) -> None:
        self.forward, self.set_threads = backend.forward, backend.set_threads


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny")


def write_heads(folder: Path, model: Path, heads: int = 3, hidden: int = HIDDEN, seed: int = 2) -> Path:
    """Write random heads in the authors' form for a model."""
    folder.mkdir()
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(hidden, hidden, generator=generator) * 0.05
        tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden)
        tensors[f"{head}.1.weight"] = torch.randn(vocab, hidden, generator=generator)
    save_file(tensors, folder / WEIGHTS)
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_eagle(folder: Path, sizes: dict[str, int]) -> Path:
    """Write a random EAGLE-3 head in the authors' form for a model of two layers."""
    hidden, inner, drafts = (sizes[name] for name in ("hidden_size", "intermediate_size", "draft_vocab_size"))
    shapes = test_eagle3.shapes(hidden, inner, drafts)
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(size, generator=generator) * 0.1 for name, size in shapes.items()}
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    return test_eagle3.write(folder, tensors, **ids, **sizes)


async def loaded(model: Path, *flags: str, kind: Any = DecodeSettings) -> tuple[Any, LoadedEngine]:
    settings = kind.from_argv([f"--model={model}", "--device=cpu", "--dtype=fp32", *flags])
    return settings, await load_engine(settings)


async def test_the_decode_worker_loads_heads_and_a_prefill_worker_needs_none(
    tiny: Path, tmp_path: Path
) -> None:
    heads = write_heads(tmp_path / "heads", tiny)
    settings, engine = await loaded(tiny, f"--speculative-model={heads}", "--speculative-tree=4,2,1")
    assert engine.heads is not None
    assert (len(engine.heads), engine.draft, engine.layout.draft) == (3, None, None)
    speculation = make_speculation(settings, engine, KVMemory(engine.layout, 4))
    assert speculation is not None
    assert (speculation._most, speculation._tokens) == (20, 21)
    _, other = await loaded(tiny, f"--speculative-model={heads}", kind=PrefillSettings)
    assert other.heads is None
    assert other.fingerprint == engine.fingerprint
    assert given_draft(str(heads), str(tiny)).text.startswith("3 Medusa heads, ")
    deep, engine = await loaded(tiny, f"--speculative-model={heads}", "--speculative-tree=2,1,1,1")
    with pytest.raises(ImpossibleTree, match="--speculative-tree 2,1,1,1: a tree of depth 4 needs as many"):
        make_speculation(deep, engine, KVMemory(engine.layout, 4))
    with pytest.raises(ImpossibleTree, match="trees are drafted by Medusa and EAGLE heads"):
        make_speculation(settings, replace(engine, heads=None), KVMemory(engine.layout, 4))


@pytest.mark.parametrize("backend", ["native", "torch"])
async def test_heads_are_loaded_whole_where_the_model_is_dealt(
    tiny: Path, tmp_path: Path, backend: str
) -> None:
    heads = write_heads(tmp_path / "heads", tiny)
    flags = (f"--speculative-model={heads}", f"--backend={backend}")
    _, engine = await loaded(tiny, *flags, "--sum-parts=2")
    assert engine.heads is not None
    assert engine.model.backend_name == f"{backend}-parts"
    assert len(engine.heads) == 3


def test_numbers_of_tokens_go_with_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speculative-model=x", "--speculative-tree=4,2,1"]
    assert DecodeSettings.from_argv(flags).step_tokens == 21
    assert DecodeSettings.from_argv([*flags, "--speculative-max-step-tokens=9"]).step_tokens == 9
    for bad, words in (
        (["--speculative-tree=2,1"], "--speculative-tree 2,1 needs heads"),
        ([flags[0], "--speculative-tree=2;1"], "branches at each depth"),
    ):
        with pytest.raises(SystemExit, match="2"):
            DecodeSettings.from_argv(bad)
        assert words in capsys.readouterr().err


async def test_heads_that_do_not_fit_and_of_other_kinds_are_refused_at_the_start(
    tiny: Path, tmp_path: Path
) -> None:
    wide = write_heads(tmp_path / "wide", tiny, hidden=32)
    with pytest.raises(UnfitHeads, match="heads of another model"):
        await loaded(tiny, f"--speculative-model={wide}")
    assert given_draft(str(wide), str(tiny)).state == "missing"
    with pytest.raises(StartupError):
        await loaded(tiny, f"--speculative-model={tmp_path / 'nothing'}")
    for number, (words, config) in enumerate(
        (
            ("in the forms of their authors alone", {"speculators_model_type": "eagle3"}),
            ("in the forms of their authors alone", {"speculators_model_type": "eagle"}),
            ("this model|a head of", {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 9}),
            ("from the model's own folder: say mtp", {"model_type": "deepseek_mtp"}),
            ("in another form than", {"model_type": "medusa"}),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for kind in (DecodeSettings, PrefillSettings):
            with pytest.raises(UnfitHeads, match=words):
                await loaded(tiny, f"--speculative-model={folder}", kind=kind)


async def test_both_workers_load_an_eagle_head_whose_keys_and_values_are_a_segment_of_blocks(
    tiny: Path, tmp_path: Path
) -> None:
    vocab = json.loads((tiny / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "vocab_size": vocab, "draft_vocab_size": vocab}
    head = write_eagle(tmp_path / "head", sizes)
    settings, engine = await loaded(tiny, f"--speculative-model={head}")
    _, other = await loaded(tiny, f"--speculative-model={head}", kind=PrefillSettings)
    assert engine.eagle is not None
    assert other.eagle is not None
    assert engine.layout.draft == engine.eagle.head.kv_layout(settings.block_size)
    assert other.fingerprint == engine.fingerprint
    assert engine.fingerprint.draft_digest
    speculation = make_speculation(settings, engine, KVMemory(engine.layout, 4))
    assert speculation is not None
    assert speculation._most == 4
    assert given_draft(str(head), str(tiny)).text.startswith("an EAGLE-3 head of ")
    tree = DecodeSettings.from_argv([f"--speculative-model={head}", "--speculative-tree=4,2,1"])
    trees = make_speculation(tree, engine, KVMemory(engine.layout, 4))
    assert trees is not None
    assert trees._most == 20
    with pytest.raises(UnfitHeads, match="EAGLE heads are not computed with the torch-parts step"):
        load_eagle(
            EagleFiles("EAGLE-3", head, tiny),
            Runner(replace(model(), backend=Plain(model().backend), backend_name="torch-parts"), 1),
            "fp32",
        )


def test_a_backend_without_hidden_rows_is_named(tiny: Path, tmp_path: Path) -> None:
    made = model()
    runner = Runner(replace(made, backend=Plain(made.backend), backend_name="torch-parts"), 1)
    with pytest.raises(UnfitHeads, match="the torch-parts step gives no hidden rows"):
        load_medusa(write_heads(tmp_path / "heads", tiny), runner, "fp32")
    assert runner.lacks_trees() == "the torch-parts step computes no trees of tokens"
