"""Settings that are refused beside recurrent layers, by name and before weights are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Lfm2Config

from decode_worker.config import DecodeSettings
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.models.recurrent import ShortConvShape
from diptych.engine.models.shape import LayerShape
from diptych.engine.weights.checkpoint import shape_of
from diptych.worker_process import engine_loader
from diptych.worker_process.config import LARGEST_GPU_BLOCK, ImpossibleSettings, why_not_together
from diptych.worker_process.engine_loader import load_engine
from diptych.worker_process.recurrent_model import check_recurrent_settings, describe_states
from prefill_worker.config import PrefillSettings
from tests.diptych.worker_process.both_workers import RECURRENT, SHAPE
from tests.end_to_end import tiny_model

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"window_blocks": "off"}, "--window-blocks off"),
    ({"kv_tier": "ram:1g"}, "--kv-tier"),
    ({"window_blocks": "off", "kv_tier": "ram:1g"}, "--kv-tier"),
    ({"tensor_parallel": 2}, "--tensor-parallel 2"),
    ({"pipeline_parallel": 2}, "--pipeline-parallel 2"),
    ({"sum_parts": 2}, "--sum-parts 2"),
    ({"speculative_model": "draft"}, "--speculative-model draft"),
    ({"speculative_tokens": 3}, "--speculative-tokens 3"),
    ({"backend": "triton"}, "--backend triton"),
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
    for backend in ("torch", "native"):
        check_recurrent_settings(PrefillSettings(model="m", secret="ab" * 32, backend=backend), RECURRENT)


async def test_a_worker_refuses_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model.write(
        tmp_path / "lfm2", config_class=Lfm2Config, num_hidden_layers=3, full_attn_idxs=[1]
    )
    monkeypatch.setattr(engine_loader, "load_whole", None)
    assert shape_of(folder).recurrent_layers == (0, 2)
    with pytest.raises(ImpossibleSettings, match="--speculative-tokens 2 does not go with"):
        await load_engine(decode(str(folder), device="cpu", speculative_tokens=2))


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
