"""Settings and models that do not go with several parts, ranks or stages: refused by flag at the start."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config

from decode_worker.config import DecodeSettings
from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.dtype import stored_dtype
from diptych.engine.loaded_model import Model
from diptych.engine.parallel.pipeline import ALONE
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel_model import (
    Dealing,
    LoadedParts,
    OpenParts,
    load_native_parts,
    load_parts,
    open_parts,
)
from diptych.engine.runner import Runner
from diptych.runtime.settings_sources import BadSettings
from diptych.worker_process.adapter_store import AdapterNotLoaded, AdapterStore
from diptych.worker_process.config import WorkerSettings
from diptych.worker_process.engine_loader import (
    ImpossibleSettings,
    _check_reads_images,
    _window_groups,
    transports_of,
)
from diptych.worker_process.group.triton_group_backend import TritonGroupBackend
from prefill_worker.config import PrefillSettings
from tests.diptych.worker_process.both_workers import WINDOWED
from tests.end_to_end import tiny_model
from tests.end_to_end.test_expert_parallel import LATENT

DOCUMENT = Path(__file__).parents[3] / "docs/parallel.md"
GROUPS: list[dict[str, Any]] = [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"sum_parts": 2}]
NAMES = ["--tensor-parallel 2", "--pipeline-parallel 2", "--sum-parts 2"]
ROLES = pytest.mark.parametrize("role", [PrefillSettings, DecodeSettings])
EACH = pytest.mark.parametrize(("group", "named"), list(zip(GROUPS, NAMES, strict=True)), ids=NAMES)


def load_native(opened: OpenParts) -> LoadedParts:
    return load_native_parts(opened, "fp32", ALONE, -1, 1)


def load_torch(opened: OpenParts) -> LoadedParts:
    return load_parts(opened, ALONE, StopWord(), 1)


def load_triton(opened: OpenParts) -> LoadedParts:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    return load_parts(opened, ALONE, StopWord(), 1, triton=True)


def store_of(model: Path, load: Callable[[OpenParts], LoadedParts]) -> AdapterStore:
    """Return the adapters of a worker of two parts."""
    opened = open_parts(model, "fp32", Dealing(2))
    loaded = load(opened)
    made = Model(opened.shape, "fp32", stored_dtype("fp32"), loaded.backend, loaded.name)
    return AdapterStore(Runner(made, 1), slots=8, max_rank=64)


def settings(role: type[WorkerSettings], **given: Any) -> WorkerSettings:
    return role.model_validate({"model": "m", "secret": "ab" * 32, **given})


@EACH
@ROLES
@pytest.mark.parametrize(
    "refused",
    [
        {"kv_cache_dtype": "int8"},
        {"quantization": "gguf"},
        {"batch_invariant": True},
        {"kv_cache_dtype": "fp8", "device": "cpu", "backend": "torch"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_flags_that_do_not_go_with_a_group(
    role: type[WorkerSettings], group: dict[str, Any], named: str, refused: dict[str, Any]
) -> None:
    flag = "--" + next(iter(refused)).replace("_", "-")
    with pytest.raises((ValueError, BadSettings)) as caught:
        settings(role, **group, **refused)
    assert named in str(caught.value)
    assert flag in str(caught.value)
    settings(role, **group)  # the control: the group alone is well


@EACH
@ROLES
@pytest.mark.parametrize("allowed", [{}, {"backend": "triton"}, {"kv_cache_dtype": "fp8"}])
def test_flags_that_go_with_a_group_on_gpus(
    role: type[WorkerSettings], group: dict[str, Any], named: str, allowed: dict[str, Any]
) -> None:
    assert settings(role, device="cuda", **group, **allowed).group_flags == named
    with pytest.raises((ValueError, BadSettings), match="--backend native computes on CPUs"):
        settings(role, device="cuda", **group, backend="native")


@ROLES
@pytest.mark.parametrize("where", [{"device": "cuda"}, {"device": "cpu", "own_memories": True}], ids=str)
def test_transports_of_groups_whose_ranks_have_memories_of_their_own(
    role: type[WorkerSettings], where: dict[str, Any]
) -> None:
    """A draft model's keys and values do not go from rank to rank."""
    two, drafting = {"tensor_parallel": 2, **where}, {"speculative_model": "bundled"}
    if where["device"] == "cuda":
        refused = "--transport cuda_ipc does not go with --speculative-model bundled and --tensor-parallel 2"
        with pytest.raises((ValueError, BadSettings), match=refused):
            settings(role, **two, **drafting, transport="cuda_ipc")
        assert settings(role, **two, transport="cuda_ipc").ranks_have_memories("cuda")
        alone = settings(role, **{**two, "tensor_parallel": 1}, **drafting, transport="cuda_ipc")
        assert not alone.ranks_have_memories("cuda")
    device = torch.device(where["device"])
    assert transports_of(settings(role, **two), device) == ("cuda_shared", "cuda_ipc", "tcp")
    assert transports_of(settings(role, **two, **drafting), device) == ("tcp",)
    for transport in ("nccl", "gloo"):
        with pytest.raises((ValueError, BadSettings), match=f"--transport {transport} does not go with"):
            settings(role, **two, transport=transport)


@pytest.mark.parametrize("kind", [TritonPartsBackend, TritonGroupBackend])
def test_heads_on_gpus(kind: type[Any]) -> None:
    """Refused where a head is loaded: no step in parts gives what heads draft from there."""
    model = Model(WINDOWED, "fp32", torch.float32, object.__new__(kind), "triton-parts")
    runner = Runner(model, 1)
    assert runner.give_hidden_rows() == "the triton-parts step gives no hidden rows"
    assert not runner.has_features


def test_trees_and_ranks_that_have_memories_of_their_own() -> None:
    tree = {"speculative_model": "heads", "speculative_tree": "3,2,1", "tensor_parallel": 2}
    with pytest.raises(
        (ValueError, BadSettings), match=r"--speculative-tree 3,2,1 does not go with --tensor"
    ):
        settings(DecodeSettings, **tree, own_memories=True)
    assert settings(DecodeSettings, **tree).group_flags == "--tensor-parallel 2"


@EACH
def test_images_and_drafts(group: dict[str, Any], named: str) -> None:
    """Refused together, as in one process; images alone are not."""
    with pytest.raises(ImpossibleSettings, match="--speculative-model does not go with a model that reads"):
        _check_reads_images(settings(PrefillSettings, **group, speculative_model="bundled"))
    seeing = settings(PrefillSettings, **group)
    _check_reads_images(seeing)
    assert seeing.group_flags == named


@EACH
def test_windows_keep_one_block_for_all_layers(
    group: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not refused: the blocks behind a window are kept, and the log says so."""
    model = Model(WINDOWED, "fp32", torch.float32, None, "native-parts")  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        assert _window_groups(settings(DecodeSettings, **group), model) is None
    assert f": {named}" in caplog.text


@pytest.mark.parametrize("load", [load_native, load_torch, load_triton])
def test_adapters_are_computed(tmp_path: Path, load: Callable[[OpenParts], LoadedParts]) -> None:
    assert store_of(tiny_model.write(tmp_path), load).max_loras == 8


def test_adapters_of_attention_over_latents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused as in one process: the log says so at the start, and the load of an adapter does."""
    model = tiny_model.write(tmp_path, config_class=DeepseekV3Config, **LATENT)
    store = store_of(model, load_torch)
    assert store.max_loras == 0
    assert "no LoRA adapters: adapters of attention over latents" in caplog.text
    with pytest.raises(AdapterNotLoaded, match="adapters of attention over latents"):
        asyncio.run(store.load(b"digest", tmp_path))


def documented() -> list[tuple[str, str, str]]:
    """Return the table of features in docs/parallel.md: feature, flags, what becomes of it in a group."""
    text = DOCUMENT.read_text().split("\n## Features\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [tuple(cell.strip().strip("`") for cell in row) for row in rows[2:]]  # type: ignore[misc]


WITH_FLAGS = [row for row in documented() if row[1]]
"""Rows that settings alone decide."""


@pytest.mark.parametrize(("feature", "flags", "fate"), WITH_FLAGS, ids=[row[0] for row in WITH_FLAGS])
def test_every_documented_feature_works_or_is_refused_by_name(
    feature: str, flags: str, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("DIPTYCH_")]:
        monkeypatch.delenv(name)
    role = PrefillSettings if "--pull-prefixes" in flags else DecodeSettings
    given = [*flags.split(), "--tensor-parallel", "2"]
    if "--remote-ranks" in flags:
        given += ["--rendezvous", "127.0.0.1:7001", "--rank-key-file", "/key"]
    if not fate.startswith("refused") or fate.startswith("refused at the load"):
        role.read_argv(given)
        return
    with pytest.raises(BadSettings) as caught:
        role.read_argv(given)
    why = str(caught.value.faults[0])
    assert flags.split()[0] in why or "--all2all-backend" in why


def test_the_table_of_features_has_a_row_for_every_refusal() -> None:
    refused = " ".join(flags for _, flags, fate in WITH_FLAGS if fate.startswith("refused"))
    for flag in (
        "kv-tier",
        "kv-cache-dtype",
        "quantization",
        "backend",
        "batch-invariant",
        "transport",
    ):
        assert f"--{flag}" in refused
    load = " ".join(feature for feature, flags, fate in documented() if not flags and "refused" in fate)
    for kind in ("latents", "both phases", "images beside"):
        assert kind in load
