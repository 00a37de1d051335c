"""The check of batch invariance that every switch and precision of the native step has to pass."""

from __future__ import annotations

import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.models.shape import ModelShape
from tests.kernels.cpu.tiny_models import Pool, layout_of, tokens_of

_PROMPT = tokens_of(150)


def assert_same_bits(backend: NativeBackend, shape: ModelShape, dtype: torch.dtype) -> None:
    """Compare a sequence alone, on one thread, with itself in chunks, on more threads, beside others."""
    expected = _run(backend, shape, dtype, 150, 1, 0)
    for chunk, threads, beside in ((150, 3, 0), (40, 1, 1), (75, 2, 3), (11, 1, 0)):
        actual = _run(backend, shape, dtype, chunk, threads, beside)
        for want, got in zip(expected, actual, strict=True):
            assert torch.equal(want, got), (chunk, threads, beside)


def _run(
    backend: NativeBackend, shape: ModelShape, dtype: torch.dtype, chunk: int, threads: int, beside: int
) -> list[torch.Tensor]:
    """Return the sequence's logits after its prompt and two tokens more, and the bits that were stored."""
    backend.set_threads(threads)
    pool = Pool(layout_of(shape, 16, dtype), 200, seed=chunk)
    sequence, neighbours = pool.sequence(170), [pool.sequence(200) for _ in range(beside)]
    for start in range(0, len(_PROMPT), chunk):
        steps = [
            neighbour.step(tokens_of(1 + 7 * i, seed=start + i), wants_logits=False)
            for i, neighbour in enumerate(neighbours)
        ]
        logits = backend.forward([*steps, sequence.step(_PROMPT[start : start + chunk])], None)
    results = [logits]
    for token in (3, 99):
        steps = [neighbour.step([token + i]) for i, neighbour in enumerate(neighbours)]
        results.append(backend.forward([sequence.step([token]), *steps], None)[:1])
    stored = sequence.memory.data[sequence.table].contiguous()
    return [*results, stored.view(torch.int32 if dtype == torch.float32 else torch.int16)]
