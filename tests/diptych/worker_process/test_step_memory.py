"""Planned memory of a rank's steps: its buffers and what it gathers, as a real step of a group takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.engine.backends.triton.activations import activation_bytes
from diptych.engine.backends.triton.parts_activations import PartsActivations, parts_activation_bytes
from diptych.engine.backends.triton.step_plan import gathered_bytes
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.stages import Grid
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from diptych.worker_process.step_memory import chunk_bytes
from tests.diptych.engine.backends.triton.test_parts_backend import TritonRanks
from tests.diptych.engine.models.family_models import config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.thread_ranks import ThreadCommunicator
from tests.kernels.cpu.tiny_models import shape_of

TOKENS, DTYPE = 40, torch.float32

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenCheckpoint:
    """Six query heads, three KV heads."""
    return open_checkpoint(save(oracle_of(config_of("smollm3")), tmp_path_factory.mktemp("m")), "fp32")


def bytes_of(buffers: PartsActivations) -> int:
    """Return the bytes of all buffers, each memory once."""
    every = [buffers.outputs, buffers.added]
    for own in buffers.own:
        every += [value for value in vars(own).values() if isinstance(value, torch.Tensor)]
        every += [half for pair in own.angles for half in pair]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in every}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(("parts", "ranks"), [(1, 1), (3, 1), (3, 3), (6, 2)])
def test_planned_bytes_are_those_of_a_ranks_buffers_and_of_what_it_gathers(
    opened: OpenCheckpoint, parts: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, all_gather = [0], ThreadCommunicator.all_gather

    def noting(self: ThreadCommunicator, own: torch.Tensor) -> torch.Tensor:
        found = all_gather(self, own)
        if own.dim() == 3:
            gathered.append(found.nbytes)
        return found

    group = TritonRanks(opened, parts, ranks)
    monkeypatch.setattr(ThreadCommunicator, "all_gather", noting)
    group.step(group.memory(), 0, text_of(TOKENS))
    layers = group.backends[0]._layers
    shapes = [half.shape for half in layers._halves]
    hidden = TOKENS * opened.shape.hidden_size * DTYPE.itemsize
    assert max(gathered) == (parts * hidden if ranks > 1 else 0), "a lone rank adds what lies in its outputs"
    planned = parts_activation_bytes(shapes, parts, TOKENS, DTYPE)
    assert planned == bytes_of(layers.buffers(TOKENS)) + max(gathered)


def engine_of(shape: ModelShape, parts: int, grid: Grid) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(shape=shape, dtype=torch.bfloat16),
        parts=parts,
        whole_experts=False,
        all_to_all=False,
        group=None if grid.size == 1 else SimpleNamespace(grid=grid),
    )


def test_a_group_plans_what_its_fullest_rank_takes() -> None:
    """Three KV heads on two parts are one and two: the second rank gathers and computes more."""
    shape = shape_of(num_heads=6, num_kv_heads=3, intermediate_size=4096, max_context=32_768)
    whole = chunk_bytes(engine_of(shape, 1, Grid(1)), TOKENS)
    dtype = torch.bfloat16
    assert whole == activation_bytes(shape, TOKENS, dtype) + gathered_bytes(shape, dtype)
    dealt = chunk_bytes(engine_of(shape, 2, Grid(2)), TOKENS)
    assert dealt > gathered_bytes(shape, dtype) * 2 // 3
    assert dealt < whole, "the control: a whole model's heads are not on one card"
    assert chunk_bytes(engine_of(shape, 2, Grid(2, 2)), TOKENS) == dealt, "stages have as wide layers"


def test_outputs_of_many_parts_are_counted_where_a_whole_model_has_one() -> None:
    """A wide stream and narrow layers: what all parts add is more than the rank's own buffers save."""
    shape = shape_of(
        hidden_size=4096, num_heads=8, num_kv_heads=8, head_dim=8, intermediate_size=64, max_context=128
    )
    tokens = 16_384
    whole, dealt = (chunk_bytes(engine_of(shape, parts, Grid(parts)), tokens) for parts in (1, 8))
    assert dealt - whole > 5 * tokens * shape.hidden_size * torch.bfloat16.itemsize
