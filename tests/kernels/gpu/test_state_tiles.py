"""Pages whose blocks go while a kernel runs, as those of an aborted sequence do, are written nowhere else."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.gpu.state_space import state_space
from kernels.state_pages import NO_PAGE
from tests.kernels.gpu.paged_states import Pages
from tests.kernels.gpu.recurrence_inputs import space_constants, space_inputs


def written(blocks: list[int], device: torch.device) -> torch.Tensor:
    """Return which blocks of a memory a row's states change; the first one lies before the pool."""
    rule = space_constants(1, 16, 1, 16, device)
    pages = Pages.make(1, 256, 0, 64, device)
    memory = torch.cat([torch.zeros_like(pages.memory[:1]), pages.memory]).nan_to_num()
    before = memory.clone()
    runs = replace(pages.rows([0], [0]), pool=memory[1:])
    runs.written[0] = torch.tensor(blocks, dtype=torch.int32)
    conv, mixed = space_inputs(rule, 1, device)
    state_space(conv, mixed, rule, runs, 0, out=torch.empty(1, 16, device=device))
    return (memory != before).any(dim=1).nonzero().flatten() - 1


def test_a_block_that_is_gone_is_written_nowhere(device: torch.device) -> None:
    assert written([3, 1, 0, 2], device).tolist() == [0, 1, 2, 3]
    assert written([3, NO_PAGE, 0, NO_PAGE], device).tolist() == [0, 3]
    assert written([NO_PAGE] * 4, device).tolist() == []
