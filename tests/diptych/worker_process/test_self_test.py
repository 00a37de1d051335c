"""A worker whose engine does not compute, or not the same twice, never serves."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.runner import Runner
from diptych.worker_process.self_test import SelfTestFailed, compare_logits, run_self_test
from tests.diptych.worker_process.both_workers import layout, model


def test_a_healthy_engine_passes_the_self_test() -> None:
    runner, tokens = Runner(model(), 1), []
    runner.on_step = lambda _, count: tokens.append(count)
    run_self_test(runner, layout())
    assert tokens == 2 * [17, 1, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_the_self_test(bad: float) -> None:
    good, broken = torch.zeros(1, 8), torch.tensor([[0.0] * 7 + [bad]])
    with pytest.raises(SelfTestFailed, match="not finite"):
        compare_logits([good, broken], [good, good])
    with pytest.raises(SelfTestFailed, match="not finite"):
        compare_logits([good, good], [good, broken])


def test_different_logits_the_second_time_fail_the_self_test() -> None:
    one = torch.linspace(-5, 5, 8)[None]
    compare_logits([one, one], [one, one + 1e-5])
    with pytest.raises(SelfTestFailed, match="step 1"):
        compare_logits([one, one], [one, one.flip(1)])


class Flaky(Runner):
    """Memory that gives another number now and then."""

    def step(self, sequences, abort=None):  # type: ignore[no-untyped-def]
        logits = super().step(sequences, abort)
        self.count = getattr(self, "count", 0) + 1
        return logits + (self.count == 5)


def test_flaky_memory_fails_the_self_test() -> None:
    with pytest.raises(SelfTestFailed, match="second time"):
        run_self_test(Flaky(model(), 1), layout())
