"""Settings that are refused beside recurrent layers, by name and before weights are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import Lfm2Config

from decode_worker import pool_memory as decode_pool
from decode_worker.config import DecodeSettings
from diptych.cli.doctor import given_draft
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.torch.recurrent.step_states import StepStates
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.gpu_memory import GpuMemory
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.models.recurrent import ShortConvShape
from diptych.engine.models.shape import LayerShape
from diptych.engine.weights.checkpoint import shape_of
from diptych.runtime.settings import StartupError
from diptych.worker_process import engine_loader
from diptych.worker_process.config import LARGEST_GPU_BLOCK, ImpossibleSettings, why_not_together
from diptych.worker_process.draft_loader import UnfitDraftModel
from diptych.worker_process.engine_loader import load_engine
from diptych.worker_process.recurrent_model import (
    check_recurrent_settings,
    describe_states,
    held_state_bytes,
)
from prefill_worker.config import PrefillSettings
from prefill_worker.gpu_plan import plan_steps
from tests.diptych.worker_process.both_workers import RECURRENT, SHAPE
from tests.end_to_end import tiny_model
from tests.kernels.cpu.tiny_models import weights_of

STEP_LAYOUT = kv_layout(RECURRENT, torch.float32, 4)
PLAIN_LAYOUT = kv_layout(SHAPE, torch.float32, 4)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"window_blocks": "off"}, "--window-blocks off"),
    ({"kv_tier": "ram:1g"}, "--kv-tier"),
    ({"window_blocks": "off", "kv_tier": "ram:1g"}, "--kv-tier"),
    ({"tensor_parallel": 2}, "--tensor-parallel 2"),
    ({"pipeline_parallel": 2}, "--pipeline-parallel 2"),
    ({"sum_parts": 2}, "--sum-parts 2"),
    ({"batch_invariant": True}, "--batch-invariant"),
]


def decode(model: str = "m", **changes: Any) -> DecodeSettings:
    return DecodeSettings(model=model, secret="ab" * 32, **changes)


@pytest.mark.parametrize(("settings", "flag"), REFUSED)
def test_what_is_not_computed_is_refused_by_its_flag(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ImpossibleSettings, match=f"^{flag} does not go with the recurrent layers of llama$"):
        check_recurrent_settings(decode(**settings), RECURRENT)
    check_recurrent_settings(decode(**settings), SHAPE)


def test_other_settings_are_not_refused() -> None:
    check_recurrent_settings(decode(), RECURRENT)
    check_recurrent_settings(decode(speculative_tokens=3), RECURRENT)
    check_recurrent_settings(decode(speculative_model="draft"), RECURRENT)
    for backend in ("torch", "native", "triton"):
        check_recurrent_settings(PrefillSettings(model="m", secret="ab" * 32, backend=backend), RECURRENT)


async def test_a_worker_refuses_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model.write(
        tmp_path / "lfm2", config_class=Lfm2Config, num_hidden_layers=3, full_attn_idxs=[1]
    )
    monkeypatch.setattr(engine_loader, "load_whole", None)
    assert shape_of(folder).recurrent_layers == (0, 2)
    with pytest.raises(ImpossibleSettings, match="--window-blocks off does not go with"):
        await load_engine(decode(str(folder), device="cpu", window_blocks="off"))
    heads = tmp_path / "heads"
    heads.mkdir()
    (heads / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    drafts: list[tuple[Path, type[StartupError], str]] = [
        (heads, ImpossibleSettings, "heads do not go with the recurrent layers of lfm2"),
        (folder, UnfitDraftModel, "a draft model may have no recurrent layers, as lfm2 has"),
    ]
    for named, kind, why in drafts:
        with pytest.raises(kind, match=f"^--speculative-model {named}: {why}"):
            await load_engine(decode(str(folder), device="cpu", speculative_model=str(named)))
        assert why in given_draft(str(named), str(folder)).text


def test_states_and_larger_blocks_are_described() -> None:
    assert describe_states(kv_layout(SHAPE, torch.float32, 16)) is None
    small = describe_states(kv_layout(RECURRENT, torch.float32, 16))
    assert small == (
        "recurrent states of 4 layers take 0.00 MiB, 1 block of 16 tokens; a sequence keeps 2 such pages"
    )
    wide = LayerShape(attention=False, recurrent=ShortConvShape(4000, 3))
    large = describe_states(kv_layout(replace(SHAPE, layers=(wide, LayerShape())), torch.float32, 16))
    assert large is not None
    assert large.startswith("recurrent states of 1 layers take 0.03 MiB, 32 blocks of 16 tokens;")
    assert large.endswith(". With --block-size 128 they take about 4 blocks")


def test_no_block_is_advised_that_a_gpu_refuses() -> None:
    wide = LayerShape(attention=False, recurrent=ShortConvShape(40_000, 3))
    layout = kv_layout(replace(SHAPE, layers=(wide, LayerShape())), torch.float32, 16)
    for device, advised in (("cpu", 1024), ("cuda", LARGEST_GPU_BLOCK)):
        assert f". With --block-size {advised} they take about" in str(describe_states(layout, device))
    settings = decode(block_size=2 * LARGEST_GPU_BLOCK)
    assert "--block-size" in str(why_not_together(settings, "cuda"))
    assert why_not_together(decode(block_size=LARGEST_GPU_BLOCK), "cuda") is None


def held(rows: int = 0, prompts: int = 0, tokens: int = 0, backend: str = "torch") -> int:
    model: Any = SimpleNamespace(backend_name=backend)
    return held_state_bytes(model, STEP_LAYOUT, rows=rows, prompts=prompts, tokens=tokens)


@pytest.mark.parametrize(("rows", "tokens"), [(6, 0), (3, 9)], ids=["decode", "prompts"])
def test_a_step_in_torch_holds_no_more_states_than_planned(
    rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one token after a first one, or prompts of several tokens, whose places have pages each."""
    kept: list[int] = []
    finish = StepStates.finish

    def count(states: StepStates, abort: AbortWords | None) -> list[int]:
        runs = [run.kept for run in states._runs]
        kept.append(sum(one.nbytes for run in runs for _, _, parts in run for one in parts))
        return finish(states, abort)

    monkeypatch.setattr(StepStates, "finish", count)
    blocks = own_blocks(STEP_LAYOUT, 12)
    memory = KVMemory(STEP_LAYOUT, rows * blocks)
    tables = [own_tables(STEP_LAYOUT, range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
    computes = TorchBackend(RECURRENT, weights_of(RECURRENT, torch.float32))
    for start, count_ in ((0, tokens),) if tokens else ((0, 1), (1, 1)):
        text = list(range(start, start + count_))
        steps = [
            SequenceStep(memory, table, start, text, True, window_tables=pages) for table, pages in tables
        ]
        computes.forward(steps, None)
    planned, too_little = (
        held(prompts=count, tokens=count * tokens) if tokens else held(count) for count in (rows, rows // 3)
    )
    assert too_little < kept[-1] <= planned


def test_other_steps_hold_no_states() -> None:
    assert held(64, backend="triton") == 0
    assert held_state_bytes(cast(Any, SimpleNamespace(backend_name="torch")), PLAIN_LAYOUT, rows=64) == 0


def engine_on(card: int) -> Any:
    model = SimpleNamespace(
        shape=RECURRENT, dtype=torch.float32, device=torch.device("cuda"), backend_name="torch"
    )
    memory = GpuMemory("cuda:0", card, lambda: 0)
    return SimpleNamespace(
        model=model,
        memory=memory,
        layout=STEP_LAYOUT,
        parts=1,
        group=None,
        runner=SimpleNamespace(recorded_prompts=0),
    )


def test_plans_of_both_workers_count_the_states_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(decode_pool, "allocate_device_pool", lambda layout, blocks, device: blocks)

    def room(device: torch.device, utilization: float, recordings: int, temporaries: int) -> int:
        found.append(temporaries)
        return 1 << 20

    monkeypatch.setattr(decode_pool, "free_pool_bytes", room)
    engine = engine_on(8 << 30)
    decode_pool._allocate(decode(max_batch=1024, max_local_prefill_tokens=0), engine, 0)
    states = held(1024, 1024, 1024)
    assert engine.memory.uses["recurrent states of a step"] == states > 0
    assert found == [engine.memory.uses["chunks of prompts"] + states]
    engine = engine_on(8 << 30)
    whole = plan_steps(engine, 2048, 32)
    assert whole == engine.memory.uses["prompts"] + held(prompts=32, tokens=2048)
    engine.model.backend_name = "triton"
    assert plan_steps(engine, 2048, 32) == engine.memory.uses["prompts"], "the control"
