"""Systems whose layers with a window have blocks of their own, and those where one block has all layers."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from decode_worker.config import DecodeSettings
from diptych.engine.backend import Backend
from diptych.engine.loaded_model import Model
from diptych.worker_process.engine_loader import ImpossibleSettings, _window_groups
from prefill_worker.config import PrefillSettings
from tests.diptych.worker_process.both_workers import SHAPE, WINDOWED


def model(**changes: Any) -> Model:
    given: dict[str, Any] = {"shape": WINDOWED, "backend_name": "native", **changes}
    return Model(precision="fp32", dtype=torch.float32, backend=cast(Backend, None), **given)


def decode(**changes: Any) -> DecodeSettings:
    return DecodeSettings(model="m", secret="ab" * 32, **changes)


def test_both_workers_have_the_same_groups() -> None:
    here = _window_groups(decode(), model(), images=False)
    there = _window_groups(
        PrefillSettings(model="m", secret="ab" * 32), model(backend_name="torch"), images=False
    )
    assert here is not None
    assert here == there
    assert here.window == 9


@pytest.mark.parametrize(
    ("settings", "changes", "images"),
    [
        ({"window_blocks": "off"}, {}, False),
        ({}, {"shape": SHAPE}, False),
        ({}, {}, True),
        ({}, {"backend_name": "triton"}, False),
        ({}, {"device": torch.device("meta")}, False),
        ({"tensor_parallel": 2}, {}, False),
        ({"speculative_model": "draft"}, {}, False),
        ({"window_blocks": "off", "kv_tier": "ram:1g"}, {}, False),
        ({"kv_tier": "ram:1g"}, {"shape": SHAPE}, False),
    ],
)
def test_one_block_has_all_layers(settings: dict[str, Any], changes: dict[str, Any], images: bool) -> None:
    assert _window_groups(decode(**settings), model(**changes), images=images) is None


def test_tiers_beside_windowed_blocks_are_refused() -> None:
    with pytest.raises(ImpossibleSettings, match=r"--kv-tier .+: set --window-blocks off, everywhere$"):
        _window_groups(decode(kv_tier="ram:1g"), model(), images=False)
