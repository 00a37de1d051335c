"""Recurrent layers by the Triton step on a GPU: recorded steps are torch's, and the service says what
transformers says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import Launched, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.models.recurrent import RecurrentShape, ShortConvShape
from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape
from diptych.engine.models.shape import LayerShape, ModelShape
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams
from tests.end_to_end.test_recurrent import ANSWER, PROMPTS, answers, best, serving
from tests.end_to_end.tiny_system import tokens
from tests.kernels.cpu.tiny_models import shape_of, tokens_of, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROWS, LENGTH, SIZE = 5, 700, 16
DEVICE = torch.device("cuda:0")


KINDS: dict[str, RecurrentShape] = {
    "short convolution": ShortConvShape(512, 3),
    "delta rule": DeltaShape(4, 8, 128, 128, 4),
    "delta rule of odd sizes": DeltaShape(3, 6, 96, 192, 4, apart=True, largest_rate=2.0),
    "Mamba-2": SpaceShape(8, 64, 1, 128, 4),
    "Mamba-2 in groups": SpaceShape(6, 128, 2, 256, 4, norm="before_gate"),
    "Mamba": ScanShape(1024, 16, 4, 32),
}


def hybrid(kind: str) -> ModelShape:
    """Return a shape like LFM2's: ten layers, of which three attend; the others are of `kind`."""
    kept = LayerShape(attention=False, recurrent=KINDS[kind])
    layers = tuple(LayerShape() if layer in (2, 5, 8) else kept for layer in range(10))
    shape = shape_of(
        max_context=2048, head_dim=64, num_heads=8, num_kv_heads=2, hidden_size=512, layers=layers
    )
    assert shape.recurrent_layers
    return shape


class Case:
    """Texts of several lengths over one memory on the card, and what torch makes of each as a whole."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self.weights, self.layout = weights_of(shape, dtype), kv_layout(shape, dtype, SIZE)
        self.blocks = own_blocks(self.layout, LENGTH)
        self.memory = KVMemory.on_device(self.layout, ROWS * self.blocks, DEVICE)
        self.backend = TritonBackend(shape, self.weights, DEVICE)
        self.backend.plan_decode(ROWS, SIZE, windows=self.layout.windows)
        self.backend.prepare_decode(self.memory)
        assert self.backend.record_prompts(self.layout, 128) > 0
        self.texts = [tokens_of(LENGTH, vocab_size=shape.vocab_size, seed=row).copy() for row in range(ROWS)]
        self.torch = TorchBackend(shape, self.weights)

    def step(self, row: int, start: int, end: int, follows: int | None = None) -> SequenceStep:
        table, pages = own_tables(self.layout, range(row * self.blocks, (row + 1) * self.blocks))
        part = self.texts[row][start:end]
        return SequenceStep(self.memory, table, start, part, True, follows=follows, window_tables=pages)

    def expected(self, row: int, end: int) -> torch.Tensor:
        """Return the logits of torch, on the CPU, behind the first `end` tokens of a text."""
        table, pages = own_tables(self.layout, range(self.blocks))
        memory, part = KVMemory(self.layout, self.blocks), self.texts[row][:end]
        return self.torch.forward([SequenceStep(memory, table, 0, part, True, window_tables=pages)], None)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_and_decode_steps_are_those_of_torch(kind: str, dtype: torch.dtype) -> None:
    """Recorded and eager prompts, of several sequences at once, then recorded decode steps."""
    case = Case(hybrid(kind), dtype)
    near = {"atol": 2e-3, "rtol": 0.0} if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.1}
    ends = [0] * ROWS
    for counts in ((100, 17, 600, 5, 1), (12, 64, 3, 1, 90), (1,) * ROWS, (1,) * ROWS, (1,) * ROWS):
        steps = [case.step(row, ends[row], ends[row] + count) for row, count in enumerate(counts)]
        found = case.backend.forward(steps, None)
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
        for row, logits in enumerate(found):
            torch.testing.assert_close(logits, case.expected(row, ends[row]), **near)
    stale = case.backend.forward(
        [case.step(0, ends[0] - 1, ends[0]), case.step(1, ends[1], ends[1] + 1)], None
    )
    assert stale.isnan().any(dim=1).tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_launched_ahead_sample_what_single_steps_do(kind: str) -> None:
    case = Case(hybrid(kind), torch.bfloat16)

    def run(ahead: bool) -> list[list[int]]:
        begun = case.backend.forward([case.step(row, 0, 40 + 9 * row) for row in range(ROWS)], None)
        out = [[int(logits.argmax())] for logits in begun]
        waiting: list[Launched] = []
        for number in range(60):
            batch, draws = [], []
            for row in range(ROWS):
                follows = row if ahead and waiting else None
                start = 40 + 9 * row + number
                case.texts[row][start : start + 1] = out[row][-1:]
                batch.append(case.step(row, start, start + 1, follows=follows))
                draws.append(SampleRow(SamplingParams(temperature=0.0), (), out[row]))
            launched = case.backend.launch(batch, draws, None)
            assert launched is not None
            waiting.append(launched)
            while len(waiting) > int(ahead):
                collect(waiting.pop(0), out)
        for launched in waiting:
            collect(launched, out)
        return out

    def collect(launched: Launched, out: list[list[int]]) -> None:
        for row, token in enumerate(launched.collect().tokens):
            assert isinstance(token, Sampled)
            out[row].append(token.token_id)

    assert run(ahead=False) == run(ahead=True)


def test_text_through_the_whole_stack_is_that_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "lfm2"
    with serving(folder, "--device", "cuda") as served:
        first = [tokens(answer)[0] for answer in answers(served, PROMPTS)]
        assert [len(answer) for answer in first] == [ANSWER] * len(PROMPTS)
        assert all(best(folder, *one) for one in zip(PROMPTS, first, strict=True))
        (again,) = answers(served, [PROMPTS[-1]])
        assert tokens(again) == first[-1:]
        served.stack.wait_idle()
