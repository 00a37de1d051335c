"""The threads of a model come and go with it: no wake-up may be lost, at whatever moment a model ends."""

from __future__ import annotations

import random
import threading
from queue import SimpleQueue

import torch

from diptych.engine.backends.native.backend import NativeBackend
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, weights_of

MODELS = 1000
SHAPE = shape_of(num_layers=1, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=16)


def wrong_steps(models: int, seed: int) -> int:
    """Steps with other logits than the first one, of models with none to three steps each, on numbers of
    threads that grow and shrink from step to step.
    """
    chooser = random.Random(seed)
    weights = weights_of(SHAPE, torch.float32)
    step = Pool(layout_of(SHAPE, 16, torch.float32), 1).sequence(16).step([1, 2, 3])
    expected = NativeBackend(SHAPE, weights, torch.float32).forward([step], None)
    wrong = 0
    for _ in range(models):
        backend = NativeBackend(SHAPE, weights, torch.float32)
        for _ in range(chooser.randrange(4)):
            backend.set_threads(chooser.choice([1, 2, 2, 3, 5]))
            wrong += not torch.equal(backend.forward([step], None), expected)
    return wrong


def test_thousands_of_teams_begin_and_end() -> None:
    results: SimpleQueue[int] = SimpleQueue()
    for seed in range(2):
        # Daemons: a thread that hangs in the library must not keep the test's failure from being told.
        threading.Thread(target=lambda n=seed: results.put(wrong_steps(MODELS, n)), daemon=True).start()
    assert [results.get(timeout=250) for _ in range(2)] == [0, 0]
