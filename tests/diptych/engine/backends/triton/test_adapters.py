"""Rows with adapters in packed steps and in recorded decode steps; on a GPU with the kernels themselves.

Triton's interpreter takes a minute for these; what the kernels compute is in their own test.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams
from tests.diptych.engine.adapters.test_adapters import SHAPE, write_for_shape
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import layout_of, tokens_of, weights_of
from tests.triton_device import DEVICES, device_of

GREEDY = SampleRow(SamplingParams(temperature=0.0), [], [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of the step; on the CPU torch takes the place of the kernels."""
    return device_of(request.param, interprets=False)


def test_prompts_and_recorded_steps_equal_the_torch_backend(device: torch.device, tmp_path: Path) -> None:
    """Launched steps follow each other; the first with adapters is recorded when it is needed."""
    weights = weights_of(SHAPE, torch.float32)
    ours = TritonBackend(SHAPE, weights, device, None if device.type == "cuda" else REFERENCE_OPERATORS)
    theirs = TorchBackend(SHAPE, weights)
    layout = layout_of(SHAPE, 16, torch.float32)
    memory, other = KVMemory.on_device(layout, 3, device), KVMemory(layout, 3)
    ours.plan_decode(4, 16)
    ours.prepare_decode(memory)
    folders = [write_for_shape(tmp_path / str(rank), rank, rank=rank) for rank in (3, 16)]
    for backend in (ours, theirs):
        assert backend.allow_adapters(2, 16) is None
        for slot, folder in enumerate(folders):
            backend.set_adapter(slot, backend.prepare_adapter(read_adapter(folder, SHAPE, 16)))
    prompts, slots = [tokens_of(5 + n, seed=n) for n in range(3)], [None, 0, 1]

    def steps(of: KVMemory, chosen: list[int | None]) -> list[SequenceStep]:
        return [
            SequenceStep(of, [n], 0, prompt, True, adapter=slot)
            for n, (prompt, slot) in enumerate(zip(prompts, chosen, strict=True))
        ]

    expected = theirs.forward(steps(other, slots), None)
    torch.testing.assert_close(ours.forward(steps(memory, slots), None), expected, rtol=1e-4, atol=1e-4)
    swapped = ours.forward(steps(memory, [None, 1, 0]), None)
    assert (swapped - expected).abs().max() > 0.1, "adapters that are swapped should show"
    ours.forward(steps(memory, slots), None)

    texts = [[*prompt, int(token)] for prompt, token in zip(prompts, expected.argmax(-1), strict=True)]
    wanted = []
    for _ in range(3):
        rows = [
            SequenceStep(other, [n], len(text) - 1, text[-1:], True, adapter=slots[n])
            for n, text in enumerate(texts)
        ]
        for text, token in zip(texts, theirs.forward(rows, None).argmax(-1).tolist(), strict=True):
            text.append(token)
        wanted.append([text[-1] for text in texts])
    first = [
        SequenceStep(
            memory, [n], len(prompt), texts[n][len(prompt) : len(prompt) + 1], True, adapter=slots[n]
        )
        for n, prompt in enumerate(prompts)
    ]
    base = ours.launch(first[:1], [GREEDY], None)
    assert base is not None
    assert base.collect().tokens == [Sampled(wanted[0][0])]
    launched = ours.launch(first, [GREEDY] * 3, None)
    assert launched is not None
    for turn in (1, 2):
        follow = [
            SequenceStep(memory, [n], len(prompt) + turn, [0], True, follows=n, adapter=slots[n])
            for n, prompt in enumerate(prompts)
        ]
        ahead = ours.launch(follow, [GREEDY] * 3, None)
        assert list(launched.collect().tokens) == [Sampled(t) for t in wanted[turn - 1]]
        launched = ahead
        assert launched is not None
    assert launched.collect().tokens == [Sampled(token) for token in wanted[2]]
