"""Groups whose ranks have memories of their own on GPUs hand blocks off: by sockets, mapped, and in place.

Where there is one GPU, all ranks share it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.end_to_end import tiny_model
from tests.end_to_end.rank_processes import answer, resumed, serving
from tests.end_to_end.test_rank_hosts import ODD, PROMPTS, TOKENS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2), (2, 1)])
def test_the_tokens_are_those_of_one_process_with_the_same_parts(
    tmp_path: Path, prefill: int, decode: int, transport: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = tiny_model.write(tmp_path, **ODD)
    alone = {"tensor-parallel": 1, "sum-parts": 2, "device": "cuda"}
    with serving(model, alone, alone, transport) as stack:
        expected = [answer(stack, prompt, TOKENS) for prompt in PROMPTS]
    degrees = [{**alone, "tensor-parallel": ranks} for ranks in (prefill, decode)]
    with serving(model, degrees[0], degrees[1], transport) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        in_place = transport == "cuda_ipc" and prefill == decode
        used = "cuda_shared" if in_place else transport
        assert f"transport {used} between {decode} ranks there" in stack.log.read_text()
        assert resumed(stack, PROMPTS[2], TOKENS, 0) == expected[2]
