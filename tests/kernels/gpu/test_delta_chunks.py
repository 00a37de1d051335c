"""The gated delta rule of many tokens equals torch's: several sequences, borders of chunks and pieces."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.delta_chunks import CHUNK, DeltaScratch, delta_chunks
from tests.kernels import recurrent_meanings
from tests.kernels.gpu.paged_states import Pages
from tests.kernels.gpu.recurrent_cases import PIECES, ROWS, compare, delta_inputs, delta_rule

SIZES = [
    (1, 2, 16, 32, 0, 48, torch.float32),
    pytest.param(1, 3, 12, 20, 16, 32, torch.bfloat16, marks=pytest.mark.full),
    pytest.param(2, 4, 9, 7, 5, 11, torch.float32, marks=pytest.mark.full),
    pytest.param(2, 4, 96, 192, 16, 1024, torch.float32, marks=pytest.mark.full),
]
"""Key heads, value heads, keys, values, first float of the states, floats of a block."""


@pytest.mark.parametrize(("key_heads", "heads", "keys", "values", "begin", "block", "dtype"), SIZES)
def test_pieces_of_several_sequences(
    key_heads: int, heads: int, keys: int, values: int, begin: int, block: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    rule = delta_rule(key_heads, heads, keys, values, device, largest_rate=2.0)
    ours = Pages.make(8, heads * keys * values, begin, block, device)
    compare(
        delta_chunks, recurrent_meanings.delta, delta_inputs(rule, ROWS, device, dtype), rule,
        heads * values, ours, ours.pieces(PIECES), 156, tolerance=1e-4 if dtype == torch.float32 else 2e-2,
        scratch=DeltaScratch.make(ROWS, 6, rule, device),
    )  # fmt: skip


def test_a_sequence_has_the_same_bits_beside_others(device: torch.device) -> None:
    rule = delta_rule(1, 1, 16, 16, device)
    conv, mixed = delta_inputs(rule, 40, device)
    pages = Pages.make(4, 256, 0, 64, device)
    scratch = DeltaScratch.make(40, 2, rule, device)
    together, alone = torch.empty(40, 16, device=device), torch.empty(40, 16, device=device)
    both = pages.pieces([(0, [(15, -1)]), (1, [(25, 3)])])
    delta_chunks(conv.clone(), mixed, rule, pages.pages, both, scratch=scratch, out=together)
    one = pages.pieces([(1, [(25, 2)])])
    delta_chunks(
        conv[15:].clone(), mixed[15:], rule, pages.pages, one, scratch=scratch, out=alone[15:]
    )
    assert torch.equal(together[15:], alone[15:])
    kept = [pages.pages.memory[pages.tables[page].long(), :64] for page in (2, 3)]
    assert torch.equal(*kept)


def test_scratch_that_is_too_small_is_refused(device: torch.device) -> None:
    rule = delta_rule(1, 1, 16, 16, device)
    pages = Pages.make(2, 256, 0, 64, device)
    conv, mixed = delta_inputs(rule, 2 * CHUNK, device)
    with pytest.raises(ValueError, match="2 are to be computed|3 are to be computed"):
        delta_chunks(
            conv, mixed, rule, pages.pages, pages.pieces([(0, [(2 * CHUNK, 1)])]),
            scratch=DeltaScratch.make(CHUNK, 1, rule, device), out=torch.empty(2 * CHUNK, 16, device=device),
        )  # fmt: skip
