"""Products in one order of sums: the meaning, and the same bits for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

import kernels.gpu.invariant_linear as unit
from kernels.gpu.invariant_linear import invariant_linear, proven_tiles
from tests.kernels.gpu.paged import DTYPES, TOLERANCE, error

ROWS, OUTPUTS, DEPTH = 150, 70, 200
COUNTS = (1, 2, 16, 17, 64, 65, ROWS)


@pytest.fixture(autouse=True)
def forget_tiles() -> Iterator[None]:
    proven_tiles.cache_clear()
    yield
    proven_tiles.cache_clear()


def case(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x `[ROWS, DEPTH]`, a weight `[OUTPUTS, DEPTH]` and a bias."""
    torch.manual_seed(3)
    sizes = ((ROWS, DEPTH), (OUTPUTS, DEPTH), (OUTPUTS,))
    x, weight, bias = (torch.randn(size, device=device).to(dtype) for size in sizes)
    return x, weight / 14, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_invariant_linear_equals_the_product(dtype: torch.dtype, biased: bool, device: torch.device) -> None:
    x, weight, some = case(dtype, device)
    bias = some if biased else None
    wide = torch.full((ROWS, OUTPUTS + 9), 7.0, device=device)
    got = invariant_linear(x, weight, bias, out=wide[:, 4:-5])
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert error(got, expected) < 1e-5
    assert bool((wide[:, :4] == 7.0).all())
    assert bool((wide[:, -5:] == 7.0).all())
    assert error(invariant_linear(x, weight, bias), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_among_any_number(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = case(dtype, device)
    alone = torch.cat([invariant_linear(x[row : row + 1], weight, bias) for row in (0, 15, 16, 63)])
    for count in COUNTS:
        got = invariant_linear(x[:count], weight, bias)
        rows = [row for row in (0, 15, 16, 63) if row < count]
        assert torch.equal(got[rows], alone[: len(rows)])


def test_tiles_of_different_bits_are_not_used_together(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """The control: a tile of another depth rounds otherwise, and is found out."""
    x, weight, bias = case(torch.bfloat16, device)
    assert proven_tiles(device, torch.bfloat16, DEPTH) == (0, 1, 2)
    other = tuple(tile | {"BK": 16 << place} for place, tile in enumerate(unit._TILES))
    monkeypatch.setattr(unit, "_TILES", other)
    out = [torch.empty(4, OUTPUTS, device=device) for _ in range(2)]
    unit._launch(x[:4], weight, bias, out[0], other[0])
    unit._launch(x[:4], weight, bias, out[1], other[2])
    if torch.equal(*out):
        pytest.skip("instructions of this device add alike whatever the tile")
    proven_tiles.cache_clear()
    assert proven_tiles(device, torch.bfloat16, DEPTH) == (1,)
    assert "one tile serves all rows" in caplog.text
    whole = invariant_linear(x, weight, bias)
    assert torch.equal(invariant_linear(x[:1], weight, bias), whole[:1])


def test_no_rows_are_no_work_and_others_are_refused(device: torch.device) -> None:
    x, weight, _ = case(torch.bfloat16, device)
    assert invariant_linear(x[:0], weight).shape == (0, OUTPUTS)
    with pytest.raises(TypeError, match="of one format"):
        invariant_linear(x, weight.float())
    with pytest.raises(ValueError, match="weights of 200"):
        invariant_linear(x[:, :8].contiguous(), weight)
    with pytest.raises(ValueError, match="lie apart"):
        invariant_linear(x, weight, out=torch.empty(OUTPUTS, ROWS, dtype=x.dtype, device=device).t())
