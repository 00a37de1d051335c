"""What the peers of the attention kernels are given means what ours are given."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention import paged_attention
from kernels.paged_decode import paged_decode
from lab.gpu.attention import attention
from lab.gpu.attention_peers import decode_peers, prefill_peers
from lab.gpu.operators import operators
from lab.gpu.paged_case import BLOCK_SIZE, HEAD_DIM, KV_HEADS, paged_case, random_query
from lab.gpu.section import Context, Unmeasured
from lab.gpu.tune import tune

CPU = torch.device("cpu")


def test_sdpa_computes_what_the_decode_kernel_does() -> None:
    torch.manual_seed(1)
    case, query = paged_case(3, 37, CPU), random_query(3, CPU)
    expected = paged_decode(query, case.blocks, 0, case.tables.long(), torch.full((3,), 37))
    got = dict(decode_peers())["SDPA"](case, query)()
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)


def test_sdpa_computes_what_the_prefill_kernel_does() -> None:
    torch.manual_seed(2)
    case, query = paged_case(1, 37, CPU), random_query(37, CPU)
    expected = paged_attention(query, case.blocks, 0, case.tables[0].long(), 0)
    got = dict(prefill_peers())["SDPA"](case, query)()
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)


def test_pages_by_token_hold_the_same_numbers() -> None:
    torch.manual_seed(3)
    case = paged_case(2, 20, CPU)
    keys, values = case.dense()
    pages = case.by_token()[case.tables[1].long()]
    assert pages.shape == (2, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    for part, dense in ((0, keys), (1, values)):
        lanes = pages[:, part].flatten(0, 1)[:20]
        assert torch.equal(lanes.transpose(0, 1), dense[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_every_section_says_so() -> None:
    context = Context(torch.device("cuda"), quick=True, say=lambda _: None)
    for section in (attention, operators):
        with pytest.raises(Unmeasured, match="no CUDA device"):
            list(section(context))
    with pytest.raises(Unmeasured, match="no CUDA device"):
        tune(context, None, ("attention", "products"))
