"""The recurrences of the native step against torch's layers, of odd sizes, in any cuts, and with controls."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape
from tests.kernels.cpu.recurrences import SETS, Case, compile_recurrences, softplus

ROWS = 141
"""Tokens: more than two pieces of torch's, and of the native function's."""
SPACE = SpaceShape(6, 9, 2, 12, 4)
SHAPES = {
    "delta": DeltaShape(2, 6, 24, 56, 4),
    "delta-apart": DeltaShape(3, 3, 7, 13, 3, apart=True, largest_rate=2.0, norm_eps=1e-3),
    "delta-wide": DeltaShape(1, 2, 33, 150, 4),
    "space": SPACE,
    "space-bounds": replace(SPACE, norm="before_gate", step_bounds=(0.4, 0.9)),
    "space-ungrouped": SpaceShape(3, 8, 1, 64, 4, norm="none", conv_bias=False),
    "scan": ScanShape(37, 6, 4, 5),
    "scan-wide": ScanShape(64, 16, 2, 8),
}
KINDS = ("delta", "space", "scan")
Shape = Any


def _runs_here(name: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    needed = {"plain": "", "avx2": "avx2", "avx512": "avx512bw"}
    return needed[name] in flags


_HERE = [name for name in SETS if _runs_here(name)]


@pytest.fixture(
    scope="module",
    params=[name if name == _HERE[-1] else pytest.param(name, marks=pytest.mark.full) for name in _HERE],
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The recurrences for an instruction set of this machine, in the short form the best."""
    return compile_recurrences(request.param, tmp_path_factory.mktemp("recurrences"))


def _far(case: Case, other: Case) -> float:
    """Return how far the outputs of another layer's native function are from the layer's, at most."""
    mixed, states = case.mixed(ROWS), case.states()
    return (other.native(mixed, states)[0] - case.expected(mixed, states)[0]).abs().max().item()


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_states_are_the_references(name: str, library: ctypes.CDLL) -> None:
    case = Case(SHAPES[name], library)
    for rows in (1, 2, ROWS):
        mixed, states = case.mixed(rows), case.states()
        for got, expected in zip(case.native(mixed, states), case.expected(mixed, states), strict=True):
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_bits_do_not_depend_on_cuts(name: str, library: ctypes.CDLL) -> None:
    case = Case(SHAPES[name], library)
    mixed, states = case.mixed(ROWS), case.states()
    whole = case.native(mixed, states)
    for cuts in ((1,), (3, 67, 68), tuple(range(1, ROWS))):
        for got, expected in zip(case.native(mixed, states, cuts), whole, strict=True):
            assert torch.equal(got, expected)
    changed = (states[0], states[1] + 1e-3)
    assert not torch.equal(case.native(mixed, changed)[0], whole[0])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("delta", {"largest_rate": 2.0}),
        ("delta", {"norm_eps": 0.5}),
        ("space", {"norm": "before_gate"}),
        ("space", {"norm": "none"}),
        ("space", {"step_bounds": (0.0, 0.5)}),
        ("space", {"step_bounds": (1.0, math.inf)}),
    ],
)
def test_switches_that_are_left_out_show(name: str, changes: dict[str, Any], library: ctypes.CDLL) -> None:
    case = Case(replace(SHAPES[name], **changes), library)
    without = Case(SHAPES[name], library)
    without.tensors |= case.tensors
    assert _far(case, case) < 1e-4
    assert _far(case, without) > 1e-2


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(("delta", tensor) for tensor in ("decay", "step_bias", "norm")),
        *(("space", tensor) for tensor in ("decay", "step_bias", "skip", "norm")),
        *(("scan", tensor) for tensor in ("decay", "step_bias", "skip")),
    ],
)
def test_weights_that_are_left_out_show(name: str, tensor: str, library: ctypes.CDLL) -> None:
    case, without = Case(SHAPES[name], library), Case(SHAPES[name], library)
    without.tensors[tensor] = torch.zeros_like(case.tensors[tensor])
    assert _far(case, case) < 1e-4
    assert _far(case, without) > 1e-2


def test_softplus_is_exact_to_the_last_bits(library: ctypes.CDLL) -> None:
    x = torch.cat([torch.linspace(-90, 90, 20001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    exact = torch.nn.functional.softplus(x.double(), threshold=1000)
    found = softplus(library, x).double()
    held = exact > 1e-37
    assert ((found - exact).abs() / exact)[held].max() < 5e-7
    assert found[~held].abs().max() < 1e-37
    assert softplus(library, torch.tensor([math.nan])).isnan().all()
