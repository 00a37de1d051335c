"""Sizes that a model may have."""

from __future__ import annotations

import pytest

from diptych.engine.models.shape import UnsupportedModel
from tests.kernels.cpu.tiny_models import shape_of


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_sees_nothing_is_refused(window: int) -> None:
    with pytest.raises(UnsupportedModel, match="window"):
        shape_of(windows=(None, window))


def test_a_window_that_no_context_outgrows_is_none() -> None:
    """Configs may write "all" as a number that only 64 bits hold."""
    context = shape_of().max_context
    shape = shape_of(num_layers=3, windows=(context - 1, context, 2**32 + 5))
    assert [shape.window(layer) for layer in range(3)] == [context - 1, None, None]
