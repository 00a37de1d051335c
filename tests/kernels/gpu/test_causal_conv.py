"""Causal convolutions over states in pages equal torch's: rows, pieces, several sequences, borders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.causal_conv import conv_pieces, conv_step
from tests.kernels import recurrent_meanings
from tests.kernels.gpu.paged_states import Pages, on_cpu

CHANNELS = [(24, 4, 16, 32), (9, 3, 5, 7), (64, 2, 0, 48), (300, 4, 64, 128)]
"""Channels, taps, first float of the states, floats of a block."""


def inputs(rows: int, channels: int, taps: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3 * channels, generator=generator)
    weight, bias = torch.randn(channels, taps, generator=generator), torch.randn(channels, generator=generator)
    return x.to(device), weight.to(device), bias.to(device)


@pytest.mark.parametrize(("channels", "taps", "begin", "block"), CHANNELS)
@pytest.mark.parametrize("short", [False, True])
def test_rows_of_one_token(
    channels: int, taps: int, begin: int, block: int, short: bool, device: torch.device
) -> None:
    ours = Pages.make(6, (taps - 1) * channels, begin, block, device)
    theirs = ours.twin()
    # The second row goes on in its page, the third has none before, the fourth is padding.
    rows = ours.rows([0, 1, -1, 4], [2, 1, 3, -1])
    x, weight, bias = inputs(4, channels, taps, device)
    how: dict[str, Any] = {"silu": not short}
    if short:
        how |= {"before": channels, "after": 2 * channels}
    out, expected = torch.empty(4, channels, device=device), torch.empty(4, channels)
    conv_step(x[:, :channels], weight, None if short else bias, ours.pages, rows, out=out, **how)
    recurrent_meanings.conv(
        x.cpu()[:, :channels], weight.cpu(), None if short else bias.cpu(), theirs.pages, on_cpu(rows),
        out=expected, **how,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(ours.pages.memory.cpu().nan_to_num(7), theirs.pages.memory.nan_to_num(7))


@pytest.mark.parametrize(("channels", "taps", "begin", "block"), CHANNELS)
def test_pieces_of_several_sequences(
    channels: int, taps: int, begin: int, block: int, device: torch.device
) -> None:
    ours = Pages.make(8, (taps - 1) * channels, begin, block, device)
    theirs, untouched = ours.twin(), ours.twin()
    # One that goes on in its page by a token and crosses its end, one from the beginning, padding, a long one.
    rows = ours.pieces(
        [(0, [(1, 0), (2, 1)]), (-1, [(19, 2)]), (3, []), (4, [(0, 6), (16, -1), (17, 5)])]
    )
    x, weight, bias = inputs(60, channels, taps, device)
    out = torch.full((60, channels), 7.0, device=device)
    conv_pieces(x[:, :channels], weight, bias, ours.pages, rows, silu=True, out=out)
    expected = torch.full((60, channels), 7.0)
    recurrent_meanings.conv(
        x.cpu()[:, :channels], weight.cpu(), bias.cpu(), theirs.pages, on_cpu(rows), silu=True, out=expected
    )
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert (out[55:] == 7.0).all()
    assert torch.equal(ours.pages.memory.cpu().nan_to_num(7), theirs.pages.memory.nan_to_num(7))
    assert not torch.equal(theirs.pages.memory.nan_to_num(7), untouched.pages.memory.nan_to_num(7))


def test_a_row_has_the_same_bits_however_its_text_is_cut(device: torch.device) -> None:
    channels, taps = 40, 4
    x, weight, bias = inputs(9, channels, taps, device)
    pages = Pages.make(3, (taps - 1) * channels, 0, 64, device)
    whole, cut = torch.empty(9, channels, device=device), torch.empty(9, channels, device=device)
    conv_pieces(
        x[:, :channels], weight, bias, pages.pages, pages.pieces([(0, [(9, 1)])]), silu=True, out=whole
    )
    first = pages.pieces([(0, [(7, 2)])])
    conv_pieces(x[:7, :channels], weight, bias, pages.pages, first, silu=True, out=cut[:7])
    for row in (7, 8):
        step = pages.rows([2], [2])
        conv_step(x[row : row + 1, :channels], weight, bias, pages.pages, step, silu=True, out=cut[row : row + 1])
    assert torch.equal(whole, cut)
